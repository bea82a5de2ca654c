//! Precompiled headers: the parsed prelude, which NVRTC keeps in a file for the programs after it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;

/// The first version of NVRTC that precompiles headers.
const SINCE: (u32, u32) = (12, 8);

/// The parsed prelude of several programs: a file of 10 MB for an architecture, in a folder that is
/// removed on drop. Only the process that wrote it can read it.
#[derive(Debug)]
pub struct PrecompiledHeaders {
    folder: TempDir,
    is_disabled: AtomicBool,
}

impl PrecompiledHeaders {
    /// A new folder without headers, or none if the compiler is too old for them or the folder
    /// cannot be made: then every program parses its prelude.
    pub fn new(version: (u32, u32)) -> Option<PrecompiledHeaders> {
        if version < SINCE {
            return None;
        }
        let folder = tempfile::Builder::new()
            .prefix("slabwise-headers-")
            .tempdir();
        let folder = folder
            .inspect_err(|e| log::info!("there is no folder for precompiled headers: {e}"))
            .ok()?;
        Some(PrecompiledHeaders {
            folder,
            is_disabled: AtomicBool::new(false),
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The compiler options by which it writes headers on their first use and reads them after that.
    pub(super) fn options(&self) -> Option<[String; 2]> {
        let folder = self.folder.path().to_str()?;
        let is_enabled = !self.is_disabled.load(Ordering::Relaxed);
        is_enabled.then(|| ["--pch".into(), format!("--pch-dir={folder}")])
    }

    /// Stops the use of headers after a failure.
    pub(super) fn disable(&self) {
        self.is_disabled.store(true, Ordering::Relaxed);
    }
}
