//! The mapping of opened files to the weights of a model, and reading them.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::tensor::Dtype;
use slabwise_kernels::spec::Quantization;
use slabwise_planner::brief;

use super::assembly::Assembly;
use super::convert::{self, Bytes as _, Fault, WINDOW};
use super::fit::{Expected, Loaded, PROBLEMS_MAX};
use super::gguf;
use super::map::{self, Mapped, Origin};
use super::open::{Stored, Weights};
use super::pattern::Pattern;
use super::rules::{Rule, Rules};
use super::{Quantized, WeightsError, to_format};

/// The parts of files that make each weight of a model.
pub(crate) struct LoadPlan<'w> {
    weights: &'w Weights,
    /// The tensors of the files, by the indices that assemblies use.
    stored: Vec<(&'w str, &'w Stored)>,
    /// The assembly of each expected weight; `None` for one that keeps its value.
    assemblies: Vec<Option<Assembly>>,
    pub(crate) loaded: Loaded,
}

/// The tensors of files, as rules start from.
fn origins(weights: &Weights) -> Vec<Origin> {
    let origin = |(name, stored): (&String, &Stored)| Origin {
        name: name.clone(),
        dtype: stored.dtype,
        shape: stored.shape.clone(),
    };
    weights.tensors().iter().map(origin).collect()
}

/// The names that rules give to the tensors of files.
///
/// # Errors
/// [`WeightsError::Rules`] for mistaken rules.
pub(crate) fn names_after(
    weights: &Weights,
    rules: &Rules,
) -> Result<BTreeSet<String>, WeightsError> {
    sound(rules)?;
    let mapped = map::forward(rules, &origins(weights), &|_| true);
    Ok(mapped.tensors.into_keys().collect())
}

impl<'w> LoadPlan<'w> {
    /// Maps files to a model, and looks at the values that a cast or a rule could lose.
    ///
    /// # Errors
    /// [`WeightsError::Rules`] for rules that contradict each other; [`WeightsError::Mismatch`]
    /// with every difference; [`WeightsError::Damaged`] or [`WeightsError::Read`].
    pub(crate) fn new(
        weights: &'w Weights,
        rules: &Rules,
        expected: &[Expected],
    ) -> Result<LoadPlan<'w>, WeightsError> {
        sound(rules)?;
        let stored: Vec<(&str, &Stored)> = weights
            .tensors()
            .iter()
            .map(|(name, stored)| (&**name, stored))
            .collect();
        let origins = origins(weights);
        let wanted: BTreeSet<&str> = expected.iter().map(|e| &*e.name).collect();
        let mut mapped = map::forward(rules, &origins, &|name| wanted.contains(name));
        let mut plan = LoadPlan {
            weights,
            stored,
            assemblies: Vec::new(),
            loaded: Loaded::default(),
        };
        let mut problems = std::mem::take(&mut mapped.problems);
        let (missing, extra) = plan.fit(rules, expected, &mut mapped, &mut problems);
        if problems.is_empty() {
            // Reading comes after all that headers tell.
            weights.verify()?;
            plan.look(expected, &mapped, &mut problems)?;
        }
        if problems.is_empty() {
            return Ok(plan);
        }
        let unused: Vec<String> = rules
            .list
            .iter()
            .zip(&mapped.used)
            .filter(|(rule, used)| {
                !**used
                    && matches!(
                        rule,
                        Rule::Rename { .. }
                            | Rule::Permute { .. }
                            | Rule::Deinterleave { .. }
                            | Rule::Parts { .. }
                    )
            })
            .map(|(rule, _)| rule.to_string())
            .collect();
        Err(mismatch(weights, problems, help(&missing, &extra, &unused)))
    }

    /// Finds the tensor of each weight, and gives the names that are missing and those that are not
    /// used.
    fn fit(
        &mut self,
        rules: &Rules,
        expected: &[Expected],
        mapped: &mut Mapped,
        problems: &mut Vec<String>,
    ) -> (Vec<String>, Vec<String>) {
        let any = |name: &str, of: &dyn Fn(&Rule) -> Option<&Pattern>| {
            let mut patterns = rules.list.iter().filter_map(of);
            patterns.any(|pattern| pattern.matches(name).is_some())
        };
        let mut missing = Vec::new();
        for weight in expected {
            let Expected {
                name, dtype, shape, ..
            } = weight;
            let Some(tensor) = mapped.tensors.remove(name) else {
                let allowed = any(name, &|rule| match rule {
                    Rule::AllowMissing(pattern) => Some(pattern),
                    _ => None,
                });
                if !allowed {
                    problems.push(format!("missing: `{}` ({dtype} {shape:?})", brief(name)));
                    missing.push(name.clone());
                }
                self.loaded.missing.push(name.clone());
                self.assemblies.push(None);
                continue;
            };
            if tensor.shape != *shape {
                problems.push(format!(
                    "wrong shape: `{}` is {shape:?} in the model, {:?} {}",
                    brief(name),
                    tensor.shape,
                    self.from(&tensor, rules)
                ));
            }
            let permitted = any(name, &|rule| match rule {
                Rule::Cast(pattern) => Some(pattern),
                _ => None,
            });
            if let Some(piece) = tensor
                .pieces
                .iter()
                .find(|p| !self.stored[p.source].1.is_read())
            {
                let (from, stored) = self.stored[piece.source];
                problems.push(format!(
                    "unread type: `{}` needs `{}`, which is {} in {}; types that are read: {}",
                    brief(name),
                    brief(from),
                    stored.type_name(),
                    self.weights.file_of(stored).display(),
                    gguf::readable()
                ));
            }
            let to = to_format(*dtype);
            let mut types = tensor.pieces.iter().map(|p| self.stored[p.source].1.dtype);
            if !types
                .clone()
                .all(|from| convert::is_cast(from, to, permitted))
            {
                let types: BTreeSet<String> = types.map(|from| from.to_string()).collect();
                let types: Vec<String> = types.into_iter().collect();
                problems.push(format!(
                    "wrong dtype: `{}` is {dtype} in the model, {} {}; Rules::cast permits whole numbers of another kind",
                    brief(name),
                    types.join(" and "),
                    self.from(&tensor, rules)
                ));
            } else if types.any(|from| from != to) {
                self.loaded.cast.push(name.clone());
            }
            self.loaded.count += 1;
            self.assemblies.push(Some(tensor));
        }
        let mut extra = Vec::new();
        for (name, tensor) in &mapped.tensors {
            self.loaded.extra.push(name.clone());
            let ignored = any(name, &|rule| match rule {
                Rule::IgnoreExtra(pattern) => Some(pattern),
                _ => None,
            });
            if !ignored {
                problems.push(format!(
                    "unexpected: `{}` ({:?}) {}",
                    brief(name),
                    tensor.shape,
                    self.from(tensor, rules)
                ));
                extra.push(name.clone());
            }
        }
        self.loaded.extra.append(&mut mapped.ignored);
        self.loaded.extra.sort();
        (missing, extra)
    }

    /// Where a tensor comes from: tensors and files, and the rules that made it.
    fn from(&self, tensor: &Assembly, rules: &Rules) -> String {
        let mut sources: Vec<usize> = tensor.pieces.iter().map(|piece| piece.source).collect();
        sources.dedup();
        let name = |&source: &usize| {
            let (name, stored) = self.stored[source];
            let file = self.weights.file_of(stored).file_name();
            let file = file.unwrap_or_default().to_string_lossy();
            format!(
                "`{}` {} {:?} of {file}",
                brief(name),
                stored.type_name(),
                stored.shape
            )
        };
        let sources: Vec<String> = sources.iter().map(name).collect();
        let by: Vec<String> = tensor
            .rules
            .iter()
            .filter_map(|&at| rules.list.get(at).map(ToString::to_string))
            .collect();
        let by = if by.is_empty() {
            String::new()
        } else {
            format!(", by {}", by.join(", "))
        };
        format!("in the file (from {}{by})", sources.join(" and "))
    }

    /// Looks at all values that the model's types may not have, and at tensors that must be equal.
    fn look(
        &self,
        expected: &[Expected],
        mapped: &Mapped,
        problems: &mut Vec<String>,
    ) -> Result<(), WeightsError> {
        let mut buffer = Vec::new();
        for (weight, assembly) in expected.iter().zip(&self.assemblies) {
            let to = to_format(weight.dtype);
            for piece in assembly.iter().flat_map(|a| &a.pieces) {
                let (name, stored) = self.stored[piece.source];
                if !convert::may_fail(stored.dtype, to) {
                    continue;
                }
                let mut window = self.weights.window(stored, &mut buffer);
                match convert::copy(piece, stored.dtype, to, &weight.shape, &mut window, None) {
                    Ok(()) => {}
                    Err(Fault::Read(source)) => return Err(self.weights.unread(stored, source)),
                    Err(Fault::Value { at, value }) => problems.push(format!(
                        "lost value: element {:?} of `{}` ({}) in {} is {value}, which `{}` ({}) cannot hold",
                        index(at, &stored.shape),
                        brief(name),
                        stored.type_name(),
                        self.weights.file_of(stored).display(),
                        brief(&weight.name),
                        weight.dtype
                    )),
                }
            }
        }
        for (one, other) in &mapped.equal {
            self.compare(one, other, problems)?;
        }
        Ok(())
    }

    /// Compares two tensors that stand for one weight.
    fn compare(
        &self,
        one: &Assembly,
        other: &Assembly,
        problems: &mut Vec<String>,
    ) -> Result<(), WeightsError> {
        let Some([a, b]) = [one, other]
            .map(|tensor| tensor.pieces.first().map(|p| self.stored[p.source]))
            .into_iter()
            .collect::<Option<Vec<_>>>()
            .and_then(|both| <[_; 2]>::try_from(both).ok())
        else {
            return Ok(());
        };
        let mut differ = |detail: &str| {
            problems.push(format!(
                "tied: `{}` and `{}` {detail}, but one weight stands for both",
                brief(a.0),
                brief(b.0)
            ));
        };
        let read = a.1.is_read() && b.1.is_read();
        let alike = read && one.is_whole() && other.is_whole() && a.1.dtype == b.1.dtype;
        if !alike || one.shape != other.shape {
            differ("have other types or shapes");
            return Ok(());
        }
        let (mut left, mut right) = (Vec::new(), Vec::new());
        let mut left = self.weights.window(a.1, &mut left);
        let mut right = self.weights.window(b.1, &mut right);
        let mut at = 0;
        while at < a.1.length() {
            let n = (a.1.length() - at).min(WINDOW as u64) as usize;
            let first = left.read(at, n).map_err(|e| self.weights.unread(a.1, e))?;
            let second = right.read(at, n).map_err(|e| self.weights.unread(b.1, e))?;
            if first != second {
                differ("have other values");
                return Ok(());
            }
            at += n as u64;
        }
        Ok(())
    }

    /// Whether the weight of this index is loaded.
    pub(crate) fn has(&self, at: usize) -> bool {
        self.assemblies.get(at).is_some_and(Option::is_some)
    }

    /// Reads the numbers, scales and zero points of the weight of this index, which are exactly
    /// those of the files; `None` if they do not have it in this format.
    ///
    /// # Errors
    /// See [`LoadPlan::read`].
    pub(crate) fn numbers(
        &self,
        at: usize,
        format: Quantization,
        buffer: &mut Vec<u8>,
    ) -> Result<Option<Quantized>, WeightsError> {
        let assembly = self.assemblies.get(at).and_then(Option::as_ref);
        let read = assembly
            .and_then(|tensor| gguf::numbers(self.weights, &self.stored, tensor, format, buffer));
        let read = read.transpose();
        read.map_err(|(stored, source)| self.weights.unread(stored, source))
    }

    /// Reads the weight of this index to its place in memory.
    ///
    /// # Errors
    /// [`WeightsError::Read`], also if the file has changed since the plan was made.
    pub(crate) fn read(
        &self,
        at: usize,
        weight: &Expected,
        target: &mut [u8],
        buffer: &mut Vec<u8>,
    ) -> Result<(), WeightsError> {
        let Some(assembly) = self.assemblies.get(at).and_then(Option::as_ref) else {
            return Ok(());
        };
        let to = to_format(weight.dtype);
        for pieces in assembly.pieces.chunk_by(|a, b| a.source == b.source) {
            let Some(first) = pieces.first() else {
                continue;
            };
            let (_, stored) = self.stored[first.source];
            // A bool is looked at once more, because kernels rely on 0 and 1.
            let direct = stored.is_plain()
                && stored.dtype == to
                && to != Dtype::BOOL
                && stored.length() == target.len() as u64;
            let read = if direct && assembly.is_whole() {
                let read = self.weights.read_into(stored, target);
                read.map_err(Fault::Read)
            } else {
                let mut window = self.weights.window(stored, buffer);
                pieces.iter().try_for_each(|piece| {
                    let target = Some(&mut *target);
                    convert::copy(piece, stored.dtype, to, &weight.shape, &mut window, target)
                })
            };
            read.map_err(|fault| {
                let source = match fault {
                    Fault::Read(source) => source,
                    Fault::Value { value, .. } => std::io::Error::other(format!(
                        "it changed while it was read: {value} was not there before"
                    )),
                };
                self.weights.unread(stored, source)
            })?;
        }
        Ok(())
    }
}

/// Fails if the rules themselves are mistaken.
pub(super) fn sound(rules: &Rules) -> Result<(), WeightsError> {
    let mut faults = rules.faults();
    if faults.is_empty() {
        return Ok(());
    }
    cut(&mut faults);
    Err(WeightsError::Rules {
        faults: faults.iter().map(|fault| format!("\n  {fault}")).collect(),
    })
}

/// Cuts a list that is too long to read.
pub(super) fn cut(lines: &mut Vec<String>) {
    let more = lines.len().saturating_sub(PROBLEMS_MAX);
    if more > 0 {
        lines.truncate(PROBLEMS_MAX);
        lines.push(format!("and {more} more"));
    }
}

fn mismatch(weights: &Weights, mut problems: Vec<String>, help: String) -> WeightsError {
    cut(&mut problems);
    WeightsError::Mismatch {
        path: weights.path().to_owned(),
        problems: problems.iter().map(|line| format!("\n  {line}")).collect(),
        help,
    }
}

/// The remedy for names that are missing and others that are there.
fn help(missing: &[String], extra: &[String], unused: &[String]) -> String {
    let mut help = String::new();
    if !unused.is_empty() {
        help += &format!("rules that no tensor matched: {}; ", unused.join(", "));
    }
    let ends: BTreeMap<&str, &str> = missing
        .iter()
        .flat_map(|name| {
            name.match_indices('.')
                .map(move |(at, _)| (&name[at + 1..], &**name))
        })
        .collect();
    let shorter = extra
        .iter()
        .find_map(|name| ends.get(&**name).map(|whole| (&**name, *whole)));
    let longer = missing.iter().find_map(|name| {
        let whole = extra.iter().find(|there| {
            let end = there.strip_suffix(&**name);
            end.is_some_and(|prefix| prefix.ends_with('.'))
        });
        whole.map(|whole| (&**name, &**whole))
    });
    help += &match (longer, shorter) {
        (Some((name, whole)), _) => format!(
            "names differ by a prefix: Rules::rename({:?}, \"{{*rest}}\") removes it",
            format!("{}{{*rest}}", brief(&whole[..whole.len() - name.len()]))
        ),
        (None, Some((name, whole))) => format!(
            "names differ by a prefix: Rules::rename(\"{{*rest}}\", {:?}) adds it",
            format!("{}{{*rest}}", brief(&whole[..whole.len() - name.len()]))
        ),
        (None, None) => "Rules map a layout to a model's names (rename, transpose, join, split), \
                         and leave tensors out (ignore, ignore_extra, allow_missing)"
            .to_owned(),
    };
    help
}

/// The index of an element of a row-major tensor.
fn index(at: u64, shape: &[u64]) -> Vec<u64> {
    let mut rest = at;
    let mut index: Vec<u64> = shape
        .iter()
        .rev()
        .map(|&n| {
            let i = rest % n.max(1);
            rest /= n.max(1);
            i
        })
        .collect();
    index.reverse();
    index
}

/// The type of the format that a tensor of a model gets, in a file whose floats are of `floats`.
pub(super) fn stored_as(dtype: Dtype, floats: Option<Dtype>) -> Dtype {
    match dtype {
        Dtype::F32 | Dtype::F16 | Dtype::BF16 => floats.unwrap_or(dtype),
        other => other,
    }
}
