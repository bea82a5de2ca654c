//! Weights of other programs: loading and saving by rules.

use std::collections::BTreeSet;
use std::path::Path;

use super::targets::{Parts, Target, Values, floats, targets};
use crate::error::Result;
use crate::session::{Session, Variable, fixed};
use crate::weights::{self, LoadPlan, Loaded, Rules, SaveOptions, Saved, Weights};

/// The weights and statistics of a model; state of programs is not saved for others.
fn is_weight(variable: &Variable) -> bool {
    variable.info.is_param && !variable.info.is_constant()
}

impl Session {
    /// Reads the weights of another program, by rules that map them to this session's: names,
    /// transposes, parts. Optimizer and random state stay as they are; averages of weights start
    /// anew from the weights read, and their remainders from 0. No program need have been compiled.
    /// Weights are read a part at a time, to where the session has them.
    ///
    /// ```no_run
    /// # use slabwise::prelude::*;
    /// # fn load(session: &mut Session) -> Result<()> {
    /// use slabwise::weights::{Rules, Weights};
    ///
    /// session.load_from(&Weights::open("all-MiniLM-L6-v2")?, &Rules::minilm())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// All differences at once, each with file, tensor, rule and shapes; values that the model's
    /// types do not have; rules that contradict each other. Nothing is changed then. If a file that
    /// could be read before cannot be read any more, some weights are those of the file and the
    /// others as before.
    pub fn load_from(&mut self, weights: &Weights, rules: &Rules) -> Result<Loaded> {
        self.read_values(|variables, backend, is_read| {
            let wanted = (0..variables.len()).filter(|&at| is_weight(&variables[at]));
            let shape = |v: &Variable| fixed(&v.info.dims);
            // Only of quantized weights does it matter which tensors the files have.
            let names = match variables.iter().any(|v| v.info.part.is_some()) {
                true => weights::names_after(weights, rules)?,
                false => BTreeSet::new(),
            };
            let (expected, targets) =
                targets(variables, wanted, shape, |name| names.contains(name));
            let plan = LoadPlan::new(weights, rules, &expected)?;
            let mut buffer = Vec::new();
            let loaded = || (0..targets.len()).filter(|&weight| plan.has(weight));
            let values = |weight: usize, parts: &Parts, buffer: &mut Vec<u8>| {
                let wanted = &expected[weight];
                let values = match plan.numbers(weight, parts.format, buffer)? {
                    Some(numbers) => Values::Numbers(numbers),
                    None => {
                        let elements: u64 = wanted.shape.iter().product();
                        let mut bytes = vec![0; 4 * elements as usize];
                        plan.read(weight, wanted, &mut bytes, buffer)?;
                        Values::Floats(floats(&bytes))
                    }
                };
                let checked = parts.check(&values, &wanted.name, weights.path());
                checked.map(|()| values)
            };
            for weight in loaded() {
                if let Target::Quantized(parts) = &targets[weight] {
                    values(weight, parts, &mut buffer)?;
                }
            }
            for weight in loaded() {
                match &targets[weight] {
                    Target::Variable(at) => {
                        let mut read = Ok(());
                        backend.map_write(&variables[*at].region, &mut |memory, region| {
                            let to = memory.bytes_mut(region);
                            read = plan.read(weight, &expected[weight], to, &mut buffer);
                        })?;
                        read?;
                    }
                    Target::Quantized(parts) => {
                        // It has been read before; a file may have changed since.
                        let values = values(weight, parts, &mut buffer)?;
                        parts.write(values, variables, backend)?;
                    }
                }
                targets[weight]
                    .variables()
                    .for_each(|at| is_read[at] = true);
            }
            Ok(plan.loaded)
        })
    }

    /// Writes the weights and statistics in the layout of another program: the rules by which they
    /// would be loaded, run backwards. A path that ends in `.safetensors` is a file, any other a
    /// folder, which gets `model.safetensors` or shards with their index. Each file is replaced as
    /// a whole, and needs the memory of its largest tensor.
    ///
    /// ```no_run
    /// # use slabwise::prelude::*;
    /// # fn save(session: &Session) -> Result<()> {
    /// use slabwise::weights::{Rules, SaveOptions};
    ///
    /// let options = SaveOptions::new().floats(BF16).shard_bytes(5_000_000_000);
    /// session.save_as("tuned", &Rules::llama(), &options)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// All weights that a rule cannot be applied to, a value that the type of the file does not
    /// have, or a system error. Files of an earlier save are then unchanged, except for shards,
    /// whose index is removed before the first of them is replaced.
    pub fn save_as(
        &self,
        path: impl AsRef<Path>,
        rules: &Rules,
        options: &SaveOptions,
    ) -> Result<()> {
        let declared = self.variables.params.declared();
        for weight in &declared {
            // One without a value would be left out.
            for info in weight.infos() {
                self.variables.find(&info.name)?;
            }
        }
        let saved: Vec<&Variable> = self
            .variables
            .list
            .iter()
            .filter(|v| is_weight(v))
            .collect();
        let of = |v: &&Variable| Saved {
            name: v.info.name.to_string(),
            dtype: v.info.dtype,
            shape: fixed(&v.info.dims),
            keeps_type: v.info.part.is_some(),
        };
        let model: Vec<Saved> = saved.iter().map(of).collect();
        let show = |at: usize, look: &mut dyn FnMut(&[u8])| {
            self.memory
                .backend
                .map_read(&saved[at].region, |memory, region| {
                    look(memory.bytes(region))
                })
        };
        weights::save_as(path.as_ref(), &model, rules, options, &show)
    }
}
