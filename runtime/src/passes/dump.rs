//! Dumps: the program after each pass, as files to read.

mod pattern;

use std::path::PathBuf;

use slabwise_planner::files;

use super::error::PassError;
use crate::dumps::{program_folder, source_file};
use pattern::Pattern;

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
