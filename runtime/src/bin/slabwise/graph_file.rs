//! Graphs in files, and schedules of them.

use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use slabwise::{Error, Result};
use slabwise_planner::csv;
use slabwise_planner::remat_graph::{RematGraph, TEXT_MAX};

/// The graph in a file, or what is wrong with it: that is wrong usage.
pub fn read(path: &Path) -> std::result::Result<RematGraph, String> {
    let content = csv::read_packed(path, TEXT_MAX).map_err(|error| error.to_string())?;
    RematGraph::read(&content).map_err(|error| format!("{}: {error}", path.display()))
}

/// Writes a schedule, gzipped if the file's name ends in `.gz`.
pub fn write(path: &Path, schedule: &str) -> Result<()> {
    let write = || {
        if path.extension().is_none_or(|extension| extension != "gz") {
            return std::fs::write(path, format!("{schedule}\n"));
        }
        let mut packed = GzEncoder::new(std::fs::File::create(path)?, Compression::default());
        packed.write_all(schedule.as_bytes())?;
        packed.finish()?.sync_all()
    };
    write().map_err(|source| Error::Io { path: path.into(), source })
}
