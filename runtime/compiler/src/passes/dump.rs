//! Dumps: the program after each pass, as files to read.

use std::path::PathBuf;

use regex_lite::Regex;
use slabwise_planner::{brief, files};

use super::error::PassError;
use crate::dumps::{program_folder, source_file};
use crate::error::{Error, Result};
use crate::settings;

/// Where dumps are written, and of which passes.
#[derive(Clone, Debug)]
pub struct DumpOptions {
    folder: PathBuf,
    /// The passes by name; all if there is none.
    passes: Option<Regex>,
}

impl DumpOptions {
    /// Dumps of all passes.
    pub fn all(folder: impl Into<PathBuf>) -> Self {
        DumpOptions {
            folder: folder.into(),
            passes: None,
        }
    }

    /// Reads `DIR` or `DIR:REGEX`, the value of `SLABWISE_DUMP`. The expression selects passes by
    /// name.
    ///
    /// # Errors
    /// If the folder is empty, or the expression is not a regular expression.
    pub fn parse(text: &str) -> Result<Self> {
        let (folder, passes) = match text.rsplit_once(':') {
            Some((folder, passes)) => (folder, Some(passes)),
            None => (text, None),
        };
        let wrong = |reason: &str| {
            let text = brief(text);
            Error::Value(format!(
                "SLABWISE_DUMP is {text:?}, not DIR or DIR:REGEX: {reason}"
            ))
        };
        if folder.is_empty() {
            return Err(wrong("the folder is empty"));
        }
        let passes = passes.map(Regex::new).transpose();
        Ok(DumpOptions {
            folder: folder.into(),
            passes: passes.map_err(|error| wrong(&error.to_string()))?,
        })
    }

    /// The dumps that `SLABWISE_DUMP` asks for.
    ///
    /// # Errors
    /// See [`DumpOptions::parse`].
    pub fn of_environment() -> Result<Option<Self>> {
        let text = settings::variable(settings::DUMP_PASSES);
        text.map(|text| DumpOptions::parse(&text)).transpose()
    }
}

/// The dump of one compilation.
pub(super) struct Dump {
    folder: PathBuf,
    passes: Option<Regex>,
}

impl Dump {
    /// The dump of a program, in a folder of its own.
    pub fn new(options: &DumpOptions, program: &str) -> std::result::Result<Self, PassError> {
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
        self.passes
            .as_ref()
            .is_none_or(|passes| passes.is_match(pass))
    }

    /// Writes a file.
    pub fn write(&self, name: &str, text: &str) -> std::result::Result<(), PassError> {
        let path = self.folder.join(name);
        files::replace(&path, text.as_bytes()).map_err(|source| PassError::Dump { path, source })
    }

    /// Writes the CUDA source of each function of the prepared kernels.
    pub fn write_sources(
        &self,
        program: &crate::ir::Program,
    ) -> std::result::Result<(), PassError> {
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

#[cfg(test)]
mod tests {
    use super::DumpOptions;

    #[test]
    fn passes_are_selected_by_a_regular_expression() {
        let shows = |text: &str, pass: &str| {
            let options = DumpOptions::parse(text).expect("options");
            options.passes.is_none_or(|passes| passes.is_match(pass))
        };
        assert!(
            shows("dir", "fuse") && shows("dir:", "fuse") && shows("dir:^(fuse|lower)$", "lower")
        );
        assert!(!shows("dir:^fuse$", "fuse-prologues"));
        for (text, says) in [
            ("dir:(", "not DIR or DIR:REGEX"),
            (":fuse", "the folder is empty"),
        ] {
            let error = DumpOptions::parse(text).expect_err(text).to_string();
            assert!(
                error.contains(says) && error.contains(&format!("{text:?}")),
                "{error}"
            );
        }
    }
}
