//! Results as lines of JSON in a file, which is appended to and never rewritten.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The file that results are appended to.
pub struct Output {
    file: File,
    path: PathBuf,
}

impl Output {
    /// Opens the file for appending, and creates it if it does not exist. An incomplete last line,
    /// which a killed program or a full disk leaves behind, is cut off.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn append(path: &Path) -> Result<Output, String> {
        let refuse = |e| format!("{}: results cannot be written: {e}", path.display());
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(refuse)?;
        if file.metadata().map_err(refuse)?.is_file() {
            let bytes = std::fs::read(path).map_err(refuse)?;
            let whole = bytes
                .iter()
                .rposition(|&b| b == b'\n')
                .map_or(0, |at| at + 1);
            match serde_json::from_slice::<Value>(&bytes[whole..]) {
                _ if whole == bytes.len() => {}
                Ok(_) => (&file).write_all(b"\n").map_err(refuse)?,
                Err(_) => file.set_len(whole as u64).map_err(refuse)?,
            }
        }
        Ok(Output {
            file,
            path: path.into(),
        })
    }

    /// Writes a result in one call, so that an interrupted program leaves whole lines behind.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn line(&mut self, result: &Value) -> Result<(), String> {
        let refuse = |e| format!("{}: a result cannot be written: {e}", self.path.display());
        self.file
            .write_all(format!("{result}\n").as_bytes())
            .and_then(|()| self.file.sync_data_if_file())
            .map_err(refuse)
    }
}

/// Pipes and terminals cannot be synchronised, and need not be.
trait SyncIfFile {
    fn sync_data_if_file(&mut self) -> std::io::Result<()>;
}

impl SyncIfFile for File {
    fn sync_data_if_file(&mut self) -> std::io::Result<()> {
        if self.metadata()?.is_file() {
            self.sync_data()
        } else {
            self.flush()
        }
    }
}

/// Reads the results of a file. An incomplete last line is ignored.
///
/// # Errors
/// If the file cannot be read, or a line before the last is not a result.
pub fn read(path: &Path) -> Result<Vec<Value>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let lines: Vec<&str> = text.lines().collect();
    let mut results = Vec::with_capacity(lines.len());
    for (at, line) in lines.iter().enumerate() {
        match serde_json::from_str::<Value>(line) {
            Ok(value) if value["item"].is_string() && value["status"].is_string() => {
                results.push(value)
            }
            _ if at + 1 == lines.len() && !text.ends_with('\n') => {}
            _ => {
                return Err(format!(
                    "{}: line {} is no result of slabwise-gpu",
                    path.display(),
                    at + 1
                ));
            }
        }
    }
    Ok(results)
}

/// The last result of each item, in the order of the items' first results.
pub fn latest(lines: &[Value]) -> Vec<&Value> {
    let mut places = HashMap::new();
    let mut latest: Vec<&Value> = Vec::new();
    for line in lines {
        let name = line["item"].as_str().unwrap_or_default();
        match places.get(name) {
            Some(&at) => latest[at] = line,
            None => {
                places.insert(name, latest.len());
                latest.push(line);
            }
        }
    }
    latest
}
