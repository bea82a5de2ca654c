//! MPI's libraries: where they are, and which of three binary interfaces each has.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{LIBRARY_VARIABLE, Launcher};

/// A binary interface of MPI: the values of its constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// The standard's own, from MPI 5.0 on.
    Standard,
    /// MPICH's, which Intel MPI and MVAPICH share.
    Mpich,
    /// Open MPI's, whose constants are addresses.
    OpenMpi,
}

/// The names of libraries that belong to a launcher, the best first.
fn names(launcher: Launcher) -> &'static [&'static str] {
    match launcher {
        Launcher::Mpich => &[
            "libmpi_abi.so.1",
            "libmpi_abi.so.0",
            "libmpi.so.12",
            "libmpich.so.12",
        ],
        Launcher::OpenMpi => &["libmpi.so.40", "libmpi.so.80"],
    }
}

/// Files that may be a launcher's library, in the order in which to try them: the file that
/// `SLABWISE_LIBMPI` names, alone; else those beside the launcher, on the loader's path, in the
/// wheels of the active Python, and in the folders of distributions.
pub fn find(launcher: Launcher) -> Vec<PathBuf> {
    if let Some(named) = std::env::var_os(LIBRARY_VARIABLE).filter(|v| !v.is_empty()) {
        return vec![PathBuf::from(named)];
    }
    let mut found = Vec::new();
    let mut add = |folder: &Path| {
        for name in names(launcher) {
            let file = folder.join(name);
            if file.is_file() && !found.contains(&file) {
                found.push(file);
            }
        }
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    for folder in std::env::split_paths(&path) {
        if folder.join("mpiexec").is_file() {
            for beside in ["../lib", "../lib64"] {
                add(&folder.join(beside));
            }
        }
    }
    if let Some(lib) = python_libraries() {
        add(&lib);
    }
    for folder in [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64/mpich/lib",
        "/usr/lib64/openmpi/lib",
        "/usr/local/lib",
    ] {
        add(Path::new(folder));
    }
    // The loader looks where its own path says.
    found.extend(names(launcher).iter().map(PathBuf::from));
    found
}

/// The folder of libraries of the active Python, into which wheels put MPI's.
fn python_libraries() -> Option<PathBuf> {
    let script = "import sys, os; print(os.path.join(sys.prefix, 'lib'))";
    let answer = Command::new("python3")
        .args(["-c", script])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(answer.stdout).ok()?;
    let folder = PathBuf::from(text.trim());
    folder.is_dir().then_some(folder)
}
