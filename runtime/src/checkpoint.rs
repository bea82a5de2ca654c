//! Saving and resuming: weights and state of a session as one safetensors file.

use std::collections::BTreeMap;
use std::path::Path;

use slabwise_kernels::dtype::DType;

use crate::error::Result;
use crate::session::{Session, Variable, fixed};
use crate::weights::{self, Entry, File};

/// The note in a file that names what of it is state, a line each.
const STATE: &str = "slabwise.state";

impl Session {
    /// Writes all weights and state to a safetensors file. The file is replaced as a whole: whatever happens while it is
    /// written, an earlier one of the same name stays intact.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        // Constants belong to their programs.
        let variables = || self.variables.iter().filter(|v| !v.info.is_constant());
        // What lies on another device is copied to the host first.
        let copies = match self.memory.host() {
            Some(_) => Vec::new(),
            None => {
                let copy = |v: &Variable| self.memory.look(&v.region, |memory, region| memory.bytes(region).to_vec());
                variables().map(copy).collect::<Result<Vec<_>>>()?
            }
        };
        let bytes = |at: usize, v: &'_ Variable| self.memory.host().map_or_else(|| &*copies[at], |memory| memory.bytes(&v.region));
        let entry = |(at, v)| -> Entry<'_> {
            let v: &Variable = v;
            Entry { name: &v.info.name, dtype: v.info.dtype, shape: fixed(&v.info.dims), bytes: bytes(at, v) }
        };
        let entries: Vec<Entry<'_>> = variables().enumerate().map(entry).collect();
        let state: Vec<&str> = variables().filter(|v| !v.info.is_param).map(|v| &*v.info.name).collect();
        let metadata = BTreeMap::from([(STATE.to_string(), state.join("\n"))]);
        weights::save(path.as_ref(), &entries, &metadata)?;
        self.memory.saved(path.as_ref());
        Ok(())
    }

    /// Reads weights and state from a file that [`Session::save`] wrote, so that training goes on bit-equal to a run that
    /// was not interrupted. Programs are compiled before, since they declare what there is to load.
    ///
    /// # Errors
    /// All mismatches of names, shapes and types at once; nothing is changed then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load_where(&File::open(path)?, |_| true)
    }

    /// As [`Session::load`], from a file that has been read already.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn load_file(&mut self, file: &File) -> Result<()> {
        self.load_where(file, |_| true)
    }

    /// Reads the weights of a file and leaves optimizer and random state as they are. Averages of weights start anew from what
    /// was read.
    ///
    /// # Errors
    /// As [`Session::load`], for the weights.
    pub fn load_weights(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load_where(&File::open(path)?, |is_param| is_param)?;
        self.restart_averages(0)
    }

    fn load_where(&mut self, file: &File, wanted: impl Fn(bool) -> bool) -> Result<()> {
        // What models have declared exists from here on, compiled or not.
        self.adopt(&crate::graph::Graph::default())?;
        let expected: Vec<(String, DType, Vec<u64>)> = self
            .variables
            .iter()
            .filter(|v| wanted(v.info.is_param) && !v.info.is_constant())
            .map(|v| (v.info.name.to_string(), v.info.dtype, fixed(&v.info.dims)))
            .collect();
        // A file of weights and state serves one who wants its weights alone.
        let state: Vec<&str> = file.metadata().get(STATE).map(|names| names.lines().collect()).unwrap_or_default();
        weights::match_tensors(&expected, file, |name| !wanted(false) && state.contains(&name))?;
        for variable in self.variables.iter().filter(|v| wanted(v.info.is_param)) {
            if let Some(tensor) = file.get(&variable.info.name) {
                self.memory.edit(&variable.region, |memory, region| memory.bytes_mut(region).copy_from_slice(tensor.bytes))?;
            }
        }
        Ok(())
    }
}
