//! Saving and resuming: weights and state of a session as one safetensors file.

use std::collections::BTreeSet;
use std::path::Path;

use slabwise_kernels::dtype::DType;

use crate::backend::Backend;
use crate::error::Result;
use crate::graph::Graph;
use crate::session::{BestEpoch, Session, Variable, fixed};
use crate::weights::{self, Entry, File, LoadOptions, Loaded, WeightsError};

mod foreign;
mod targets;

use targets::{Target, Values, floats, targets};

/// The metadata key that lists the names of the states in a file, a line each.
const STATE: &str = "slabwise.state";
/// The metadata key of the [best epoch](BestEpoch) of the training so far.
const BEST_EPOCH: &str = "slabwise.best_epoch";

/// The most bytes of a rank's part of a variable that ranks exchange at a time.
const PIECE: usize = 64 << 20;

impl Session {
    /// Writes all weights and state to a safetensors file, with a checksum of each. The file is
    /// replaced as a whole: an earlier one of the same name stays intact if writing is interrupted.
    /// Its permissions stay as well, and a link is followed; a pipe is written into.
    ///
    /// In a [world](Session::on) every rank calls this and rank 0 writes: all of each variable, so
    /// that a world of any size can load the file.
    ///
    /// # Errors
    /// A system error, such as a full disk.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        // Constants belong to their programs.
        let variables = || self.variables.list.iter().filter(|v| !v.info.is_constant());
        // Values on another device are copied to the host first, because the header has their sums.
        let copies = match self.memory.backend.host() {
            Some(_) => Vec::new(),
            None => {
                let copy = |v: &Variable| {
                    self.memory
                        .backend
                        .map_read(&v.region, |memory, region| memory.bytes(region).to_vec())
                };
                variables().map(copy).collect::<Result<Vec<_>>>()?
            }
        };
        let bytes = |at: usize, v: &'_ Variable| {
            self.memory
                .backend
                .host()
                .map_or_else(|| &*copies[at], |memory| memory.bytes(&v.region))
        };
        // Every rank has its part of a variable, and the first one writes the file.
        let mut wholes: Vec<Option<Vec<u8>>> = Vec::new();
        for (at, v) in variables().enumerate() {
            let part = || {
                let own = bytes_of(&fixed(&v.info.dims), v);
                bytes(at, v).get(..own)
            };
            let whole = v.info.whole.as_ref().and_then(|_| part());
            let whole = whole.map(|part| self.world.join_parts(part, PIECE));
            wholes.push(whole.transpose()?.map(|mut whole| {
                // The rest is padding.
                whole.truncate(bytes_of(&whole_dims(v), v));
                whole
            }));
        }
        if self.world.rank() > 0 {
            return Ok(());
        }
        let entry = |(at, v)| -> Entry<'_> {
            let (at, v): (usize, &Variable) = (at, v);
            Entry {
                name: &v.info.name,
                dtype: v.info.dtype,
                shape: whole_dims(v),
                bytes: wholes[at].as_deref().unwrap_or_else(|| bytes(at, v)),
            }
        };
        let entries: Vec<Entry<'_>> = variables().enumerate().map(entry).collect();
        let state = variables()
            .filter(|v| !v.info.is_param)
            .map(|v| &*v.info.name);
        let best = self.variables.best_epoch.map(BestEpoch::to_text);
        let metadata = [(STATE, Some(note(state)?)), (BEST_EPOCH, best)]
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_string(), value?)))
            .collect();
        weights::save(path.as_ref(), &entries, &metadata)?;
        self.memory.backend.saved(path.as_ref());
        Ok(())
    }

    /// Reads weights and state from a file that [`Session::save`] wrote, so that training continues
    /// bit-equal to a run that was not interrupted. Declared weights and states can be loaded at
    /// any time, even before a program is compiled; the state of an optimizer is there once the
    /// program that trains has been compiled.
    ///
    /// # Errors
    /// If the file cannot be read or is damaged, and all mismatches of names, shapes and types at
    /// once; nothing is changed then.
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load_with(path, &LoadOptions::default()).map(drop)
    }

    /// Like [`Session::load`], from a file that has been read already.
    ///
    /// # Errors
    /// See [`Session::load`].
    pub fn load_file(&mut self, file: &File) -> Result<()> {
        self.load_file_with(file, &LoadOptions::default()).map(drop)
    }

    /// Reads the weights of a file and leaves optimizer and random state as they are. Averages of
    /// weights start anew from the weights read, and their remainders
    /// ([`master_weights`](crate::optim::Optimizer::master_weights)) from 0. No program need have
    /// been compiled.
    ///
    /// # Errors
    /// Those of [`Session::load`], for the weights.
    pub fn load_weights(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load_with(path, &LoadOptions::weights()).map(drop)
    }

    /// Reads a part of a file, or one whose names differ; gives the names that were loaded and
    /// those that were not. [`Session::load_from`] reads weights of other programs, in other layouts
    /// and in shards. Floats of another type than the model's (f16, bf16, f32, and f64 into
    /// f32) are cast to the nearest that the model's type has, which for a narrower type loses
    /// digits and turns values too large for it into infinities.
    ///
    /// # Errors
    /// If the file cannot be read or is damaged, and all mismatches at once that the options do not
    /// permit; nothing is changed then.
    pub fn load_with(
        &mut self,
        path: impl AsRef<Path>,
        options: &LoadOptions<'_>,
    ) -> Result<Loaded> {
        self.load_file_with(&File::open(path)?, options)
    }

    /// Like [`Session::load_with`], from a file that has been read already.
    ///
    /// # Errors
    /// See [`Session::load_with`].
    pub fn load_file_with(&mut self, file: &File, options: &LoadOptions<'_>) -> Result<Loaded> {
        let part = self.world.part();
        // From here on the declared weights and states of models exist, compiled or not.
        let loaded = self.read_values(|variables, backend, is_read| {
            let kind =
                |v: &Variable| (v.info.is_param || !options.is_weights) && !v.info.is_constant();
            let wanted = (0..variables.len()).filter(|&at| kind(&variables[at]));
            let names = options.names(file);
            let (expected, targets) =
                targets(variables, wanted, whole_dims, |name| names.contains(name));
            // A file of weights and state may be loaded for its weights alone.
            let state: BTreeSet<&str> = file
                .metadata()
                .get(STATE)
                .map(|names| names.lines().collect())
                .unwrap_or_default();
            let (found, loaded) =
                weights::fit(&expected, file, options, |name| state.contains(name))?;
            let of_floats = |name: Option<&str>| {
                let bytes = name.and_then(|name| file.elements(name, DType::F32));
                bytes.map(|bytes| Values::Floats(floats(&bytes)))
            };
            for ((target, name), expected) in targets.iter().zip(&found).zip(&expected) {
                if let Target::Quantized(parts) = target
                    && let Some(floats) = of_floats(*name)
                {
                    parts.check(&floats, &expected.name, file.path())?;
                }
            }
            for (target, name) in targets.iter().zip(found) {
                let at = match target {
                    Target::Variable(at) => *at,
                    Target::Quantized(parts) => {
                        if let Some(floats) = of_floats(name) {
                            parts.write(floats, variables, backend)?;
                            target.variables().for_each(|at| is_read[at] = true);
                        }
                        continue;
                    }
                };
                let variable = &variables[at];
                let Some(bytes) = name.and_then(|name| file.elements(name, variable.info.dtype))
                else {
                    continue;
                };
                let own = match variable.info.whole {
                    Some(_) => {
                        let each = bytes_of(&fixed(&variable.info.dims), variable);
                        let start = bytes.len().min(part * each);
                        &bytes[start..bytes.len().min(start + each)]
                    }
                    None => &bytes,
                };
                backend.map_write(&variable.region, &mut |memory, region| {
                    memory.bytes_mut(region)[..own.len()].copy_from_slice(own)
                })?;
                is_read[at] = true;
            }
            Ok(loaded)
        })?;
        if !options.is_weights {
            let best = file.metadata().get(BEST_EPOCH);
            self.variables.best_epoch = best.and_then(|text| BestEpoch::of_text(text));
        }
        Ok(loaded)
    }

    /// Allocates the declared variables that this session does not have yet, and passes all of its
    /// variables to `read`, which reads values of some from elsewhere and marks them. New ones that
    /// are not marked are initialised, after an error too, and averages and remainders of marked
    /// weights restart.
    fn read_values<T>(
        &mut self,
        read: impl FnOnce(&[Variable], &mut dyn Backend, &mut [bool]) -> Result<T>,
    ) -> Result<T> {
        let (variables, memory) = (&mut self.variables, &mut self.memory);
        let first = variables.allocate(&Graph::default(), memory)?;
        let mut is_read = vec![false; variables.list.len()];
        let result = read(&variables.list, &mut *memory.backend, &mut is_read);
        let team = &self.execution.team;
        let initialised = variables.initialise(first, |at| is_read[at], memory, team);
        let done =
            initialised.and_then(|()| variables.restart_beside(&is_read, &mut *memory.backend));
        result.and_then(|value| done.map(|()| value))
    }
}

/// The shape of a variable in a file: of one that ranks have parts of, that of the whole.
fn whole_dims(v: &Variable) -> Vec<u64> {
    fixed(v.info.whole.as_ref().unwrap_or(&v.info.dims))
}

/// The bytes of elements of a variable's type.
fn bytes_of(lengths: &[u64], v: &Variable) -> usize {
    lengths.iter().product::<u64>() as usize * v.info.dtype.bytes()
}

/// The metadata value that lists the names of the states in a file.
///
/// # Errors
/// If a name has a line break, which would split it when read.
fn note<'n>(state: impl Iterator<Item = &'n str>) -> Result<String, WeightsError> {
    let names: Vec<&str> = state.collect();
    match names.iter().find(|name| name.contains(['\n', '\r'])) {
        Some(name) => {
            let detail =
                "the name of a state has no line break; declare it under another name".into();
            Err(WeightsError::InvalidTensor {
                tensor: (*name).into(),
                detail,
            })
        }
        None => Ok(names.join("\n")),
    }
}

#[cfg(test)]
mod tests;
