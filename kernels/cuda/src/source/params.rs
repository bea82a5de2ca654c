//! The words of a kernel's parameter, and their names in the source.

use std::fmt::Display;
use std::sync::Arc;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Spec;

use crate::abi::{Function, Target, WORDS_MAX, Word};
use crate::code::indented;

/// A number that a launch computes from its sizes.
pub type Number = Arc<dyn Fn(&Env) -> i64 + Send + Sync>;

#[derive(Clone)]
enum WordSource {
    Word(Word),
    Size(Size),
    Number(Number),
}

/// The words, in the order of their first use. Known sizes become part of the source instead.
#[derive(Clone)]
pub struct Params {
    /// Whether element offsets need 64 bits.
    wide: bool,
    sources: Vec<WordSource>,
    guarded: bool,
    /// The number of specs in a launch, each with its own words; `None` for a single spec.
    launch_members: Option<usize>,
}

impl Params {
    /// An empty parameter for a spec whose arguments have their size at `bounds`.
    pub fn new(spec: &Spec, bounds: &Env, target: &Target) -> Params {
        // Loops step past the end by at most the threads of a grid.
        let most = u64::from(u32::MAX / 4);
        let reach = |of: &[Size]| {
            of.iter().zip(&spec.dims).fold(0i64, |s, (f, d)| {
                s.saturating_add(f.at(bounds).saturating_mul(d.at(bounds)))
            })
        };
        let points = spec
            .dims
            .iter()
            .fold(1i64, |p, d| p.saturating_mul(d.at(bounds)));
        let wide = spec
            .arguments()
            .iter()
            .any(|(operand, dims, _)| operand.extent(dims, bounds) > most)
            || spec
                .indices
                .iter()
                .any(|index| reach(index).unsigned_abs() > most)
            || points.unsigned_abs() > most;
        Params {
            wide,
            sources: vec![],
            guarded: target.guarded,
            launch_members: None,
        }
    }

    /// Whether element offsets need 64 bits.
    pub fn is_wide(&self) -> bool {
        self.wide
    }

    /// The parameter of a function that several specs share: the second coordinate of a block is
    /// the number of its spec.
    pub fn shared(self) -> Params {
        Params {
            launch_members: Some(0),
            ..self
        }
    }

    /// The maximum number of specs in a launch of the function.
    pub fn launch_members(&self) -> usize {
        self.launch_members.unwrap_or(1)
    }

    /// The expression of a word in the source.
    fn expression(&mut self, source: WordSource) -> String {
        let at = self.position(source);
        if self.launch_members.is_some() {
            format!("p.w[own + {at}]")
        } else {
            format!("p.w[{at}]")
        }
    }

    fn position(&mut self, source: WordSource) -> usize {
        let same = |other: &WordSource| match (&source, other) {
            (WordSource::Word(a), WordSource::Word(b)) => a == b,
            (WordSource::Size(a), WordSource::Size(b)) => a == b,
            (WordSource::Number(a), WordSource::Number(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        self.sources.iter().position(same).unwrap_or_else(|| {
            self.sources.push(source);
            self.sources.len() - 1
        })
    }

    /// The position of a word.
    pub fn word(&mut self, word: Word) -> usize {
        self.position(WordSource::Word(word))
    }

    /// Appends consecutive numbers, and returns the position of the first one.
    pub fn block(&mut self, numbers: impl IntoIterator<Item = Number>) -> usize {
        let at = self.sources.len();
        self.sources
            .extend(numbers.into_iter().map(WordSource::Number));
        at
    }

    /// An address, as a 64-bit number.
    pub fn address(&mut self, word: Word) -> String {
        self.expression(WordSource::Word(word))
    }

    /// Declares a pointer to an argument.
    pub fn pointer(&mut self, name: &str, ty: &str, argument: usize) -> String {
        format!(
            "{ty}* const {name} = reinterpret_cast<{ty}*>({});\n",
            self.address(Word::Argument(argument as u16))
        )
    }

    /// A size: its number where it is known, unless specs of other sizes share the function.
    pub fn size(&mut self, size: Size) -> String {
        let shared = self.launch_members.is_some() && !size.is(0) && !size.is(1);
        if shared {
            self.word_of(size)
        } else {
            self.divisor(size)
        }
    }

    /// A size used as a divisor: always its number where it is known, because division by a
    /// constant is much faster.
    pub fn divisor(&mut self, size: Size) -> String {
        match size.as_fixed() {
            Some(n) if self.wide => format!("{n}ll"),
            Some(n) => n.to_string(),
            None => self.word_of(size),
        }
    }

    fn word_of(&mut self, size: Size) -> String {
        format!("idx({})", self.expression(WordSource::Size(size)))
    }

    /// A number of the launch, even if it is known now: for numbers that would otherwise create a
    /// function per size.
    pub fn number(&mut self, number: &Number) -> String {
        format!(
            "idx({})",
            self.expression(WordSource::Number(number.clone()))
        )
    }

    /// Σ coordinateᵢ · stridesᵢ + offset.
    pub fn dot(&mut self, strides: &[Size], coordinates: &[String], offset: Size) -> String {
        let mut terms: Vec<String> = Vec::new();
        for (&stride, c) in strides.iter().zip(coordinates) {
            if stride.is(1) {
                terms.push(c.clone());
            } else if !stride.is(0) && c != "0" {
                terms.push(format!("{c} * {}", self.size(stride)));
            }
        }
        if !offset.is(0) {
            terms.push(self.size(offset));
        }
        if terms.is_empty() {
            "0".into()
        } else {
            terms.join(" + ")
        }
    }

    /// Declares the coordinates `name0`, `name1`, … of the row-major position `linear`; returns
    /// their names too.
    pub fn coordinates(
        &mut self,
        linear: &str,
        dims: &[Size],
        name: &str,
    ) -> (String, Vec<String>) {
        let sizes: Vec<String> = dims.iter().map(|&d| self.divisor(d)).collect();
        Params::split(linear, &sizes, name)
    }

    /// Like [`Params::coordinates`], for sizes that are expressions; the first one is not used.
    pub fn split(linear: &str, dims: &[String], name: &str) -> (String, Vec<String>) {
        let mut text = String::new();
        let mut rest = linear.to_string();
        let mut names = vec!["0".to_string(); dims.len()];
        for axis in (0..dims.len()).rev() {
            names[axis] = format!("{name}{axis}");
            if axis == 0 {
                text += &format!("const idx {name}0 = {rest};\n");
                break;
            }
            let size = &dims[axis];
            text += &format!("const idx {name}{axis} = idx(uidx({rest}) % uidx({size}));\n");
            text += &format!("const idx {name}_{axis} = idx(uidx({rest}) / uidx({size}));\n");
            rest = format!("{name}_{axis}");
        }
        (text, names)
    }

    /// The words of a launch.
    pub fn words(&self, env: &Env) -> Vec<Word> {
        let word = |source: &WordSource| match source {
            WordSource::Word(word) => *word,
            WordSource::Size(size) => Word::Number(size.at(env)),
            WordSource::Number(number) => Word::Number(number(env)),
        };
        self.sources.iter().map(word).collect()
    }

    /// The function with these parameters and this body, for blocks of `threads` (and, after a
    /// comma, the number of blocks that a multiprocessor should hold).
    pub fn function(&mut self, kind: &str, threads: impl Display, body: &str) -> Function {
        let guard = match self.guarded {
            true => format!(
                "if (*reinterpret_cast<const u64*>({}) != ~0ull) return;\n",
                self.address(Word::Fault)
            ),
            false => String::new(),
        };
        let (signed, unsigned) = if self.wide {
            ("long long", "u64")
        } else {
            ("int", "unsigned")
        };
        // A parameter must have at least one word.
        let each = self.sources.len().max(1);
        let (count, own) = match self.launch_members {
            None => (each, String::new()),
            Some(_) => {
                let launch_members = (WORDS_MAX / each).max(1);
                self.launch_members = Some(launch_members);
                (
                    each * launch_members,
                    format!("const int own = int(blockIdx.y) * {each};\n"),
                )
            }
        };
        let text = format!(
            "extern \"C\" __global__ void __launch_bounds__({threads}) NAME(const __grid_constant__ Words<{count}> p) {{\n\
             typedef {signed} idx;\ntypedef {unsigned} uidx;\nwait_for_earlier_kernels();\n{own}{guard}{body}}}\n"
        );
        Function::new(kind, &indented(&text))
    }
}
