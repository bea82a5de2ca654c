//! Rules that map the tensors of a file to those of a model, and back.

use std::collections::BTreeMap;
use std::fmt;

use super::pattern::Pattern;

/// Rules from the tensors of files to the weights of a model: names, transposes, joined and split
/// tensors, and tensors that need not be there. Used by
/// [`Session::load_from`](crate::Session::load_from) and, backwards, by
/// [`Session::save_as`](crate::Session::save_as). There are ready-made ones for usual layouts, such
/// as [`Rules::gpt2`].
///
/// Rules are applied in their order, each to the names that the earlier ones made. A tensor that no
/// rule names keeps its name. Patterns name tensors: `{i}` captures one component between dots, or
/// the rest of one (`layer{i}`), and `{*rest}` any number of whole components, none among them.
///
/// Floats are cast to the model's type of floats, integers to its type of integers, where every
/// value fits; other casts are permitted by name ([`Rules::cast`]).
///
/// ```no_run
/// # use slabwise::prelude::*;
/// use slabwise::weights::{Rules, Weights};
///
/// # fn load(session: &mut Session) -> Result<()> {
/// let rules = Rules::new()
///     .rename("module.{*rest}", "{*rest}")
///     .transpose("blocks.{i}.mlp.weight")
///     .join(["blocks.{i}.q", "blocks.{i}.k", "blocks.{i}.v"], "blocks.{i}.attn.in_proj_weight", 0)
///     .ignore("{*layer}.attn.mask")
///     .allow_missing("head.{*rest}");
/// session.load_from(&Weights::open("pretrained")?, &rules)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Rules {
    pub(super) list: Vec<Rule>,
    faults: Vec<String>,
}

/// One rule.
#[derive(Clone, Debug)]
pub(super) enum Rule {
    Rename {
        from: Pattern,
        to: Pattern,
        /// Saving renames back.
        both_ways: bool,
    },
    Permute {
        name: Pattern,
        /// The axis of the file's tensor that becomes each axis; `None` exchanges the last two.
        axes: Option<Vec<usize>>,
    },
    Deinterleave {
        name: Pattern,
        heads: u64,
    },
    Parts {
        whole: Pattern,
        parts: Vec<(Pattern, Option<u64>)>,
        axis: usize,
        /// The file has the parts, the model the whole.
        joins: bool,
    },
    Tied(Pattern, Pattern),
    Ignore(Pattern),
    IgnoreExtra(Pattern),
    AllowMissing(Pattern),
    Cast(Pattern),
}

impl Rules {
    /// No rules: names, shapes and kinds of types are those of the model.
    pub fn new() -> Rules {
        Rules::default()
    }

    fn pattern(&mut self, text: &str) -> Pattern {
        let (pattern, fault) = Pattern::parse(text);
        self.faults.extend(fault);
        pattern
    }

    fn with(mut self, rule: impl FnOnce(&mut Rules) -> Rule) -> Rules {
        let rule = rule(&mut self);
        if let Some(fault) = rule.fault() {
            self.faults.push(format!("{rule}: {fault}"));
        }
        self.list.push(rule);
        self
    }

    /// The tensors called `from` in the file are called `to`. Both have the same captures. Saving
    /// renames back.
    #[must_use]
    pub fn rename(self, from: &str, to: &str) -> Rules {
        self.with(|rules| Rule::Rename {
            from: rules.pattern(from),
            to: rules.pattern(to),
            both_ways: true,
        })
    }

    /// Another name of the tensors called `to`, which some files use. Saving uses `to`.
    #[must_use]
    pub fn alias(self, from: &str, to: &str) -> Rules {
        self.with(|rules| Rule::Rename {
            from: rules.pattern(from),
            to: rules.pattern(to),
            both_ways: false,
        })
    }

    /// Tensors whose last two axes are exchanged, as fully connected layers stored as `[inputs,
    /// outputs]` are. By name, because the shape of a square matrix does not show it.
    #[must_use]
    pub fn transpose(self, name: &str) -> Rules {
        self.with(|rules| Rule::Permute {
            name: rules.pattern(name),
            axes: None,
        })
    }

    /// Tensors whose axes are in another order: `axes[i]` is the axis of the file's tensor that
    /// becomes axis `i`. `[3, 2, 0, 1]` makes PyTorch's convolution weights of TensorFlow's.
    #[must_use]
    pub fn permute(self, name: &str, axes: &[usize]) -> Rules {
        self.with(|rules| Rule::Permute {
            name: rules.pattern(name),
            axes: Some(axes.to_vec()),
        })
    }

    /// Tensors whose rows are those of `heads` heads for interleaved rotary embeddings, which rotate
    /// neighbours
    /// ([`RopeLayout::Interleaved`](crate::tensor::RopeLayout::Interleaved)): in each head the even
    /// rows come first and then the odd ones, so that halves are rotated, as in the models here.
    /// Saving interleaves them.
    #[must_use]
    pub fn deinterleave(self, name: &str, heads: usize) -> Rules {
        self.with(|rules| Rule::Deinterleave {
            name: rules.pattern(name),
            heads: heads as u64,
        })
    }

    /// Tensors of the file that lie one after the other along `axis` in one tensor of the model,
    /// as query, key and value. Saving splits it into equal parts.
    #[must_use]
    pub fn join<const N: usize>(self, parts: [&str; N], whole: &str, axis: usize) -> Rules {
        self.parts(&parts.map(|part| (part, None)), whole, axis, true)
    }

    /// Like [`Rules::join`], with the length of each part along the axis, for parts of different
    /// lengths.
    #[must_use]
    pub fn join_lengths(self, parts: &[(&str, usize)], whole: &str, axis: usize) -> Rules {
        self.parts(&lengths(parts), whole, axis, true)
    }

    /// A tensor of the file whose equal parts along `axis` are tensors of the model. Saving joins
    /// them.
    #[must_use]
    pub fn split<const N: usize>(self, whole: &str, parts: [&str; N], axis: usize) -> Rules {
        self.parts(&parts.map(|part| (part, None)), whole, axis, false)
    }

    /// Like [`Rules::split`], with the length of each part along the axis.
    #[must_use]
    pub fn split_lengths(self, whole: &str, parts: &[(&str, usize)], axis: usize) -> Rules {
        self.parts(&lengths(parts), whole, axis, false)
    }

    fn parts(self, parts: &[(&str, Option<u64>)], whole: &str, axis: usize, joins: bool) -> Rules {
        self.with(|rules| Rule::Parts {
            whole: rules.pattern(whole),
            parts: parts
                .iter()
                .map(|&(part, length)| (rules.pattern(part), length))
                .collect(),
            axis,
            joins,
        })
    }

    /// Two names of one weight, such as a head that is tied to the embedding. If the file has one
    /// of them and the model the other, or both, the one is loaded; if the file has both and the
    /// model one, their values must be equal.
    #[must_use]
    pub fn tied(self, one: &str, other: &str) -> Rules {
        self.with(|rules| Rule::Tied(rules.pattern(one), rules.pattern(other)))
    }

    /// Tensors of the file that are never loaded, such as stored masks, or a head for other
    /// classes.
    #[must_use]
    pub fn ignore(self, name: &str) -> Rules {
        self.with(|rules| Rule::Ignore(rules.pattern(name)))
    }

    /// Tensors of the file that the model need not have; `{*all}` stands for all of them. Unlike
    /// those of [`Rules::ignore`], they are loaded where the model has them. The names are those
    /// after all rules.
    #[must_use]
    pub fn ignore_extra(self, name: &str) -> Rules {
        self.with(|rules| Rule::IgnoreExtra(rules.pattern(name)))
    }

    /// Weights of the model that keep their values if the file does not have them; `{*all}` stands
    /// for all of them.
    #[must_use]
    pub fn allow_missing(self, name: &str) -> Rules {
        self.with(|rules| Rule::AllowMissing(rules.pattern(name)))
    }

    /// Weights of the model that may be loaded from another kind of type (an integer into a float,
    /// a float into an integer, a bool from either), where every value stays the same.
    #[must_use]
    pub fn cast(self, name: &str) -> Rules {
        self.with(|rules| Rule::Cast(rules.pattern(name)))
    }

    /// Adds rules after these.
    #[must_use]
    pub fn then(mut self, more: Rules) -> Rules {
        self.list.extend(more.list);
        self.faults.extend(more.faults);
        self
    }

    /// The mistakes in the rules themselves: faulty patterns, rules that contradict each other, and
    /// renames that lead back to their start.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = self.faults.clone();
        self.contradictions(&mut faults);
        self.circles(&mut faults);
        faults
    }

    /// Pairs of rules over the same names of which one undoes or excludes the other.
    fn contradictions(&self, faults: &mut Vec<String>) {
        let mut taken: BTreeMap<(&str, String), &Rule> = BTreeMap::new();
        for rule in &self.list {
            // A role, in which a name may be in one rule only.
            let uses: Vec<(&str, &Pattern)> = match rule {
                Rule::Rename { from, .. } | Rule::Ignore(from) => vec![("leaves", from)],
                Rule::Permute { name, .. } => vec![("permuted", name)],
                Rule::Deinterleave { name, .. } => vec![("deinterleaved", name)],
                Rule::Parts {
                    whole,
                    parts,
                    joins,
                    ..
                } => {
                    let parts = parts.iter().map(|(part, _)| part);
                    match joins {
                        true => parts.map(|part| ("leaves", part)).collect(),
                        false => vec![("leaves", whole)],
                    }
                }
                Rule::Tied(..) | Rule::IgnoreExtra(_) | Rule::AllowMissing(_) | Rule::Cast(_) => {
                    Vec::new()
                }
            };
            for (role, pattern) in uses {
                if let Some(earlier) = taken.insert((role, pattern.anonymous()), rule)
                    // To ignore a name twice is to ignore it.
                    && !matches!((earlier, rule), (Rule::Ignore(_), Rule::Ignore(_)))
                {
                    faults.push(format!("{earlier} and {rule} contradict each other"));
                }
            }
        }
    }

    /// Renames that, one after the other, lead from a name back to it.
    fn circles(&self, faults: &mut Vec<String>) {
        let edge = |rule: &Rule| match rule {
            Rule::Rename { from, to, .. } => Some((from.anonymous(), to.anonymous())),
            _ => None,
        };
        let edges: Vec<(String, String)> = self.list.iter().filter_map(edge).collect();
        for (at, (start, to)) in edges.iter().enumerate() {
            let (mut path, mut now) = (vec![&**start, &**to], to);
            for (from, to) in &edges[at + 1..] {
                if from == now && now != start {
                    path.push(to);
                    now = to;
                }
            }
            if now == start {
                faults.push(format!("renames go in a circle: {}", path.join(" → ")));
            }
        }
    }
}

/// Parts with their lengths as the format counts them.
fn lengths<'a>(parts: &[(&'a str, usize)]) -> Vec<(&'a str, Option<u64>)> {
    let part = |&(part, length): &(&'a str, usize)| (part, Some(length as u64));
    parts.iter().map(part).collect()
}

impl Rule {
    /// The mistake of a rule by itself, if it has one.
    fn fault(&self) -> Option<String> {
        let captures = |pattern: &Pattern| -> Vec<String> {
            let mut names: Vec<String> = pattern.captures().into_iter().map(Into::into).collect();
            names.sort_unstable();
            names
        };
        let differ = |one: &Pattern, other: &Pattern| {
            (captures(one) != captures(other))
                .then(|| format!("{one} and {other} have different captures"))
        };
        match self {
            Rule::Rename { from, to, .. } if from.anonymous() == to.anonymous() => {
                Some("both names are the same".into())
            }
            Rule::Rename { from, to, .. } => differ(from, to),
            Rule::Tied(one, other) if one.anonymous() == other.anonymous() => {
                Some("both names are the same".into())
            }
            Rule::Tied(one, other) => differ(one, other),
            Rule::Permute { axes: None, .. } => None,
            Rule::Deinterleave { heads, .. } => (*heads == 0).then(|| "it has no heads".into()),
            Rule::Permute {
                axes: Some(axes), ..
            } => {
                let mut sorted = axes.clone();
                sorted.sort_unstable();
                let whole = sorted.iter().enumerate().all(|(at, &axis)| at == axis);
                (!whole).then(|| format!("{axes:?} does not name each axis once"))
            }
            Rule::Parts { whole, parts, .. } => {
                let mut names: Vec<String> = parts.iter().map(|(p, _)| p.anonymous()).collect();
                names.sort_unstable();
                if parts.is_empty() {
                    return Some("it has no parts".into());
                }
                if names.windows(2).any(|two| two[0] == two[1]) {
                    return Some("the same part twice".into());
                }
                parts.iter().find_map(|(part, _)| differ(part, whole))
            }
            Rule::Ignore(_) | Rule::IgnoreExtra(_) | Rule::AllowMissing(_) | Rule::Cast(_) => None,
        }
    }
}

/// As it is written in a program.
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::Rename {
                from,
                to,
                both_ways,
            } => {
                let name = if *both_ways { "rename" } else { "alias" };
                write!(f, "{name}({from}, {to})")
            }
            Rule::Permute { name, axes: None } => write!(f, "transpose({name})"),
            Rule::Permute {
                name,
                axes: Some(axes),
            } => write!(f, "permute({name}, {axes:?})"),
            Rule::Deinterleave { name, heads } => write!(f, "deinterleave({name}, {heads})"),
            Rule::Parts {
                whole,
                parts,
                axis,
                joins,
            } => {
                let part = |(part, length): &(Pattern, Option<u64>)| match length {
                    Some(length) => format!("({part}, {length})"),
                    None => part.to_string(),
                };
                let names: Vec<String> = parts.iter().map(part).collect();
                let (names, with) = (names.join(", "), parts.iter().any(|(_, n)| n.is_some()));
                let with = if with { "_lengths" } else { "" };
                match joins {
                    true => write!(f, "join{with}([{names}], {whole}, {axis})"),
                    false => write!(f, "split{with}({whole}, [{names}], {axis})"),
                }
            }
            Rule::Tied(one, other) => write!(f, "tied({one}, {other})"),
            Rule::Ignore(name) => write!(f, "ignore({name})"),
            Rule::IgnoreExtra(name) => write!(f, "ignore_extra({name})"),
            Rule::AllowMissing(name) => write!(f, "allow_missing({name})"),
            Rule::Cast(name) => write!(f, "cast({name})"),
        }
    }
}
