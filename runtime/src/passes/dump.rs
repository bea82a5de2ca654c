//! Dumps: the program after each pass, as files to read.

mod pattern;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use slabwise_planner::files;

use super::error::PassError;
use pattern::Pattern;

/// Most characters of a program's name in the name of its folder.
const NAME_MAX: usize = 64;

/// Where dumps are written, and of which passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DumpOptions {
    folder: PathBuf,
    passes: Pattern,
}

impl DumpOptions {
    /// Dumps of all passes.
    pub fn all(folder: impl Into<PathBuf>) -> Self {
        DumpOptions {
            folder: folder.into(),
            passes: Pattern::new(""),
        }
    }

    /// Reads `DIR` or `DIR:REGEX`, the value of `SLABWISE_DUMP`. The expression selects passes by
    /// name; it knows characters, `.`, `*`, `^`, `$` and `|`.
    pub fn parse(text: &str) -> Self {
        match text.rsplit_once(':') {
            Some((folder, passes)) => DumpOptions {
                folder: folder.into(),
                passes: Pattern::new(passes),
            },
            None => DumpOptions::all(text),
        }
    }
}

/// Makes a new folder for a program inside of another: a number and the program's name.
///
/// # Errors
/// If the system cannot make it.
pub fn program_folder(root: &Path, program: &str) -> std::io::Result<PathBuf> {
    static PROGRAMS: AtomicU32 = AtomicU32::new(0);
    let plain = |c: char| match c.is_alphanumeric() || c == '-' {
        true => c,
        false => '_',
    };
    let name: String = program.chars().map(plain).take(NAME_MAX).collect();
    let number = PROGRAMS.fetch_add(1, Ordering::Relaxed);
    let folder = root.join(format!("{number:03}-{name}"));
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// The dump of one compilation.
pub(super) struct Dump {
    folder: PathBuf,
    passes: Pattern,
}

impl Dump {
    /// The dump of a program, in a folder of its own.
    pub fn new(options: &DumpOptions, program: &str) -> Result<Self, PassError> {
        let folder =
            program_folder(&options.folder, program).map_err(|source| PassError::Dump {
                path: options.folder.clone(),
                source,
            })?;
        Ok(Dump {
            folder,
            passes: options.passes.clone(),
        })
    }

    /// Whether a pass is dumped.
    pub fn shows(&self, pass: &str) -> bool {
        self.passes.matches(pass)
    }

    /// Writes a file.
    pub fn write(&self, name: &str, text: &str) -> Result<(), PassError> {
        let path = self.folder.join(name);
        files::replace(&path, text.as_bytes()).map_err(|source| PassError::Dump { path, source })
    }

    /// Writes the CUDA source of each function of the prepared kernels.
    pub fn write_sources(&self, program: &crate::ir::Program) -> Result<(), PassError> {
        let kernels = program
            .kernels
            .iter()
            .filter_map(|call| call.kernel.as_deref());
        for (name, source) in kernels.flat_map(|kernel| kernel.sources()) {
            self.write(&format!("{name}.cu"), &source_file(source))?;
        }
        Ok(())
    }
}

/// The file that the source of a CUDA function is written to.
pub fn source_file(source: &str) -> String {
    format!("#include \"prelude.cuh\"\n\n{source}")
}
