//! Graphs in files, and schedules of them.

use std::path::Path;

use slabwise::{Error, Result};
use slabwise_planner::remat_graph::{RematGraph, TEXT_MAX};
use slabwise_planner::{csv, files};

use crate::output::save;

/// The graph in a file, or its defect, which is wrong usage.
pub fn read(path: &Path) -> std::result::Result<RematGraph, String> {
    let content = csv::read_packed(path, TEXT_MAX).map_err(|error| error.to_string())?;
    RematGraph::read(&content).map_err(|error| format!("{}: {error}", path.display()))
}

/// Writes a schedule, gzipped if the file's name ends in `.gz`.
pub fn write(path: &Path, schedule: &str) -> Result<()> {
    let bytes = files::packed_for(path, &format!("{schedule}\n")).map_err(|source| Error::Io {
        path: path.into(),
        source,
    })?;
    save(path, &bytes)
}
