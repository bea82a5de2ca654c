//! The mapping of a file's tensors to a model's.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fmt;

use slabwise_kernels::dtype::DType;
use slabwise_planner::brief;

use super::file::is_cast;
use super::{File, WeightsError, from_format};

/// Most lines of differences that an error lists.
pub(super) const PROBLEMS_MAX: usize = 64;

/// The new name of a tensor, or none for a tensor that is left out.
type Rename<'a> = Box<dyn Fn(&str) -> Option<String> + 'a>;

/// Which tensors of a file are loaded, and into which weights. By default everything: each weight
/// and state of the session is in the file, and the file has nothing else.
///
/// The body of a model that was trained for other classes, whose names have a prefix that this one
/// does not use:
///
/// ```no_run
/// # use slabwise::prelude::*;
/// use slabwise::weights::LoadOptions;
///
/// # fn load(session: &mut Session) -> Result<()> {
/// let body = LoadOptions::weights().prefix("module.", "").rename(|name| (!name.starts_with("head.")).then(|| name.into()));
/// let loaded = session.load_with("pretrained.safetensors", &body.allow_missing())?;
/// println!("{} loaded, these keep their first values: {}", loaded.count, loaded.missing.join(", "));
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct LoadOptions<'a> {
    pub(crate) is_weights: bool,
    allow_missing: bool,
    ignore_extra: bool,
    renames: Vec<Rename<'a>>,
}

impl fmt::Debug for LoadOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LoadOptions {
            is_weights,
            allow_missing,
            ignore_extra,
            renames,
        } = self;
        let mut shown = f.debug_struct("LoadOptions");
        shown
            .field("is_weights", is_weights)
            .field("allow_missing", allow_missing)
            .field("ignore_extra", ignore_extra);
        shown.field("renames", &renames.len()).finish()
    }
}

impl<'a> LoadOptions<'a> {
    /// Weights alone: optimizer and random state of the session stay as they are, those of the file
    /// are skipped.
    pub fn weights() -> Self {
        LoadOptions {
            is_weights: true,
            ..LoadOptions::default()
        }
    }

    /// Weights and states that the file does not have keep their values, except for averages and
    /// remainders of weights that it has: averages start anew from the weights read, remainders
    /// from 0.
    #[must_use]
    pub fn allow_missing(self) -> Self {
        LoadOptions {
            allow_missing: true,
            ..self
        }
    }

    /// Tensors that the session does not have are skipped.
    #[must_use]
    pub fn ignore_extra(self) -> Self {
        LoadOptions {
            ignore_extra: true,
            ..self
        }
    }

    /// Names of the file that begin with `from` begin with `to` instead: `("module.", "")` removes
    /// a prefix, `("", "encoder.")` adds one to all. Several renamings are applied in order.
    #[must_use]
    pub fn prefix(self, from: impl Into<String>, to: impl Into<String>) -> Self {
        let (from, to) = (from.into(), to.into());
        self.rename(move |name| {
            Some(
                name.strip_prefix(&*from)
                    .map_or_else(|| name.into(), |rest| format!("{to}{rest}")),
            )
        })
    }

    /// The name in the session of a tensor of the file; `None` leaves it out.
    #[must_use]
    pub fn rename(mut self, rename: impl Fn(&str) -> Option<String> + 'a) -> Self {
        self.renames.push(Box::new(rename));
        self
    }

    /// The session's names of the tensors of a file.
    pub(crate) fn names(&self, file: &File) -> BTreeSet<String> {
        let names = file.tensors.keys();
        names
            .filter_map(|name| self.renamed(name).map(Cow::into_owned))
            .collect()
    }

    /// The session's name of a tensor of a file.
    fn renamed<'n>(&self, name: &'n str) -> Option<Cow<'n, str>> {
        let mut now = Cow::Borrowed(name);
        for rename in &self.renames {
            now = Cow::Owned(rename(&now)?);
        }
        Some(now)
    }
}

/// The names that were loaded, and those that were not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// The number of weights and states loaded from the file.
    pub count: usize,
    /// Names of the session that the file does not have, whose values are unchanged.
    pub missing: Vec<String>,
    /// Names of the file that were skipped, those of types that no model can have among them (such
    /// as the I64 counters of PyTorch's batch norms) and those that rules ignore, but not those
    /// that a renaming left out, nor states where only weights were requested.
    pub extra: Vec<String>,
    /// Names of the session whose values were cast, because the file has another type of floats.
    pub cast: Vec<String>,
}

/// A weight or state of a session.
pub(crate) struct Expected {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<u64>,
    /// Optimizer or random state, not a part of the model.
    pub is_state: bool,
}

/// The name in the file of each expected tensor, if the file has it, and the differences.
/// `is_state` marks names of the file that are states.
///
/// # Errors
///
/// [`WeightsError::Mismatch`] with every missing or unexpected tensor, wrong shape and wrong
/// element type that the options do not permit.
pub(crate) fn fit<'f>(
    expected: &[Expected],
    file: &'f File,
    options: &LoadOptions<'_>,
    is_state: impl Fn(&str) -> bool,
) -> Result<(Vec<Option<&'f str>>, Loaded), WeightsError> {
    let mut problems: Vec<String> = Vec::new();
    let mut of_name: BTreeMap<Cow<'_, str>, &'f str> = BTreeMap::new();
    for name in file
        .tensors
        .keys()
        .filter(|name| !(options.is_weights && is_state(name)))
    {
        let Some(renamed) = options.renamed(name) else {
            continue;
        };
        match of_name.entry(renamed) {
            Entry::Vacant(free) => drop(free.insert(name)),
            Entry::Occupied(taken) => problems.push(format!(
                "renamed alike: `{}` and `{}` both become `{}`",
                brief(taken.get()),
                brief(name),
                brief(taken.key())
            )),
        }
    }
    let (mut loaded, mut found) = (Loaded::default(), Vec::new());
    let (mut missing_states, mut fitting) = (0, Vec::new());
    for Expected {
        name,
        dtype,
        shape,
        is_state: of_state,
    } in expected
    {
        let there = of_name.remove(&**name);
        let Some(info) = there.and_then(|there| file.tensors.get(there)) else {
            found.push(None);
            loaded.missing.push(name.clone());
            if !options.allow_missing {
                missing_states += usize::from(*of_state);
                problems.push(format!("missing: `{}` ({dtype} {shape:?})", brief(name)));
            }
            continue;
        };
        found.push(there);
        fitting.extend(there);
        loaded.count += 1;
        if info.shape != *shape {
            problems.push(format!(
                "wrong shape: `{}` is {shape:?} in the model, {:?} in the file",
                brief(name),
                info.shape
            ));
        }
        if from_format(info.dtype) != Some(*dtype) {
            if is_cast(info.dtype, *dtype) {
                loaded.cast.push(name.clone());
            } else {
                let there = from_format(info.dtype)
                    .map_or_else(|| info.dtype.to_string(), |dtype| dtype.to_string());
                problems.push(format!(
                    "wrong dtype: `{}` is {dtype} in the model, {there} in the file",
                    brief(name)
                ));
            }
        }
    }
    let (mut extra_states, mut unexpected) = (0, Vec::new());
    for &name in of_name.values() {
        loaded.extra.push(name.into());
        let Some(info) = file.tensors.get(name).filter(|_| !options.ignore_extra) else {
            continue;
        };
        // A type that no model can have does not indicate another model.
        if let Some(dtype) = from_format(info.dtype) {
            extra_states += usize::from(is_state(name));
            unexpected.push(name);
            problems.push(format!(
                "unexpected: `{}` ({dtype} {:?})",
                brief(name),
                info.shape
            ));
        }
    }
    if problems.is_empty() {
        return Ok((found, loaded));
    }
    let help = if missing_states + extra_states < problems.len() {
        help(&loaded.missing, &unexpected, &fitting)
    } else if missing_states == 0 {
        format!(
            "these {extra_states} are optimizer or random state of a training, which no program compiled in this session has: \
             Session::load_weights reads the weights alone; to go on training, compile the training program first"
        )
    } else {
        "the weights fit, and only optimizer or random state differs: Session::load_weights reads the weights alone; \
         to go on training, load a file that a session with this training program saved"
            .into()
    };
    let more = problems.len().saturating_sub(PROBLEMS_MAX);
    problems.truncate(PROBLEMS_MAX);
    let mut text: String = problems.iter().map(|line| format!("\n  {line}")).collect();
    if more > 0 {
        text += &format!("\n  and {more} more");
    }
    Err(WeightsError::Mismatch {
        path: file.path().to_owned(),
        problems: text,
        help,
    })
}

/// The remedy for names that are missing and others that are there, beside those that fit.
fn help(missing: &[String], unexpected: &[&str], fitting: &[&str]) -> String {
    let pairs = missing
        .iter()
        .flat_map(|name| unexpected.iter().map(move |there| (&**name, *there)));
    let mut prefixes = pairs.filter_map(|(name, there)| {
        let longer = there.strip_suffix(name).map(|from| (from, ""));
        longer.or_else(|| name.strip_suffix(there).map(|to| ("", to)))
    });
    // A prefix ends with a part of a name, and no name that fits has it.
    let prefix = prefixes.find(|(from, to)| {
        (from.ends_with('.') || to.ends_with('.'))
            && !fitting.iter().any(|name| name.starts_with(from))
    });
    match prefix {
        Some((from, to)) => format!(
            "names differ by a prefix: Session::load_with takes LoadOptions, whose prefix({:?}, {:?}) renames them",
            brief(from),
            brief(to)
        ),
        None => "load weights of the same architecture, or change the model to fit; \
                 a part is loaded by Session::load_with and LoadOptions (allow_missing, ignore_extra, rename)"
            .into(),
    }
}
