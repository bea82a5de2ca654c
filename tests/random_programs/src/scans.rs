//! Loops over the first axis of a value: bodies of several kinds, as calls, as text, their rules.

use slabwise::{DType, Scan, Tensor, Trace};

use crate::facts::{Fact, Len};

/// A loop and the value taken from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// The body.
    pub body: Body,
    /// Whether it begins at the last step.
    pub reverse: bool,
    /// The steps between two carries that are kept for the backward pass.
    pub checkpoint_every: Option<usize>,
    /// The value taken.
    pub take: Take,
}

/// The value taken from a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// The last value of the first carry.
    Carry,
    /// The first results of all steps.
    Results,
    /// The sum of all last carries and all results.
    All,
}

macro_rules! bodies {
    ($($(#[$doc:meta])* $body:ident |$t:ident, $c:ident, $x:ident, $w:ident| $first:expr, $carries:expr, $results:expr;)*) => {
        /// The body of a loop: from carries `c`, the step's part `x` of the operand and a captured
        /// value `w` to carries and results.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Body { $($(#[$doc])* $body),* }

        impl Body {
            /// All of them.
            pub const ALL: &[Body] = &[$(Body::$body),*];

            fn run<'t>(self, trace: &'t Trace, options: Scan, [x, c, w]: [Tensor<'t>; 3]) -> (Vec<Tensor<'t>>, Vec<Tensor<'t>>) {
                match self {
                    $(Body::$body => {
                        let ($t, $c, $w) = (trace, c, w);
                        let _ = $w; // Some bodies capture nothing.
                        $t.scan_many(options, &$first, &[x], |$c, $x| ($carries.to_vec(), $results.to_vec()))
                    })*
                }
            }

            fn texts(self) -> [&'static str; 3] {
                match self { $(Body::$body => [stringify!($first), stringify!($carries), stringify!($results)]),* }
            }
        }
    };
}

bodies! {
    /// One carry.
    Gate |trace, c, x, w| [c], [(c[0] * 0.5 + x[0]).tanh()], [(c[0] * 0.5 + x[0]).tanh() * x[0]];
    /// Two carries, of which one becomes the other.
    Shift |trace, c, x, w| [c, c * 0.5], [c[1], (c[0] * 0.5 + c[1] + x[0]).tanh()], [c[1] * x[0], c[0]];
    /// Two carries that exchange places.
    Swap |trace, c, x, w| [c, c * 0.5], [c[1], c[0]], [c[0] + x[0]];
    /// Reductions in each step.
    Reduce |trace, c, x, w| [c], [(c[0] * 0.5 + x[0] - (c[0] * x[0]).mean_keep([0usize])).tanh()], [(c[0] + x[0]).softmax(0), x[0] * c[0].sum_keep([0usize])];
    /// A captured value.
    Captured |trace, c, x, w| [c, w], [(c[0] * 0.5 + x[0] * w).tanh(), c[1] * 0.5 + x[0]], [c[0] * w.tanh() + x[0], c[1]];
    /// Carries that begin as columns of a captured value, of which each step reads the other column.
    Column |trace, c, x, w| [w.slice(0, 0..1).squeeze(0), c], [(c[0] * 0.5 + x[0] * w.slice(0, 1..2).squeeze(0)).tanh(), (c[0] + c[1]).tanh()], [c[0] + c[1] + x[0] * w.sum_over(0)];
    /// A product with a captured matrix.
    Product |trace, c, x, w| [c], [(c[0].matmul(w) * 0.25 + x[0]).tanh()], [c[0] + x[0].matmul(w), c[0]];
    /// Results only; the carry stays as it is.
    Still |trace, c, x, w| [c], [c[0]], [x[0] + c[0], x[0] * 0.5];
    /// A loop in each step.
    Nested |trace, c, x, w| [c], [(c[0] * 0.5 + trace.scan([c[0].sum_over(0)], [x[0]], |[s], [r]| ([(s * 0.5 + r).tanh()], [])).0[0]).tanh()], [c[0] * x[0]];
}

impl Loop {
    fn options(self) -> Scan {
        let mut options = Scan::default();
        if self.reverse {
            options = options.reverse();
        }
        match self.checkpoint_every {
            Some(steps) => options.checkpoint_every(steps),
            None => options,
        }
    }

    pub(crate) fn apply<'t>(self, trace: &'t Trace, args: &[Tensor<'t>]) -> Tensor<'t> {
        let (x, c) = (args[0], args[1]);
        let w = args.get(2).copied().unwrap_or(c);
        let (carries, results) = self.body.run(trace, self.options(), [x, c, w]);
        match self.take {
            Take::Carry => carries[0],
            Take::Results => results[0],
            Take::All => {
                let all = results[1..].iter().chain(&carries);
                all.fold(results[0], |sum, one| sum + *one)
            }
        }
    }

    pub(crate) fn text(self, args: &[String]) -> String {
        let (x, c) = (&args[0], &args[1]);
        let w = args.get(2).unwrap_or(c);
        let mut options = "slabwise::Scan::default()".to_string();
        if self.reverse {
            options += ".reverse()";
        }
        if let Some(steps) = self.checkpoint_every {
            options += &format!(".checkpoint_every({steps})");
        }
        let [first, carries, results] = self.body.texts();
        let take = match self.take {
            Take::Carry => "carries[0]",
            Take::Results => "results[0]",
            Take::All => {
                "results[1..].iter().chain(&carries).fold(results[0], |sum, one| sum + *one)"
            }
        };
        format!(
            "{{ let (x, c, w) = ({x}, {c}, {w}); let (carries, results) = trace.scan_many({options}, &{first}, &[x], \
             |c, x| ({carries}.to_vec(), {results}.to_vec())); {take} }}"
        )
    }

    /// The shape of the captured value for carries of these lengths, if the body has one.
    pub(crate) fn captured(body: Body, rest: &[Len]) -> Option<Vec<Len>> {
        match body {
            Body::Captured => Some(rest.to_vec()),
            Body::Column => Some([&[Len::fixed(2)], rest].concat()),
            Body::Product => rest.last().map(|&n| vec![n, n]),
            _ => None,
        }
    }

    pub(crate) fn infer(self, args: &[&Fact]) -> Option<Fact> {
        let [x, first, w @ ..] = args else {
            return None;
        };
        let (steps, rest) = x.dims.split_first()?;
        let fixed = steps.as_fixed().is_some_and(|n| n > 0) && self.checkpoint_every != Some(0);
        let found = rest.iter().any(|d| d.is_data_dependent());
        let floats = args.iter().all(|f| f.dtype == DType::F32);
        (fixed && !found && floats && first.dims == rest).then_some(())?;
        let needs_rows = matches!(self.body, Body::Reduce | Body::Product | Body::Nested);
        let rows = rest.first().and_then(|n| n.as_fixed());
        (!needs_rows || rows.is_some_and(|n| n > 0)).then_some(())?;
        let captured = Loop::captured(self.body, rest);
        (captured.as_deref() == w.first().map(|w| w.dims.as_slice())).then_some(())?;
        // A gradient reaches every operand that these read.
        let passes = matches!(
            self.body,
            Body::Shift | Body::Swap | Body::Column | Body::Still
        );
        (!passes || self.take != Take::Carry).then_some(())?;
        let all: f64 = args.iter().map(|f| f.bound() + 1.0).product();
        // A product or a sum of at most so many elements.
        let terms = rest.first().and_then(|n| n.as_fixed()).unwrap_or(1);
        let last = rest.last().and_then(|n| n.as_fixed()).unwrap_or(1);
        let bound = 4.0 * all * terms.max(last).max(2) as f64;
        let dims = match self.take {
            Take::Carry => rest.to_vec(),
            _ => x.dims.clone(),
        };
        let bound = match (self.body, self.take) {
            (Body::Gate, Take::Carry) => 1.0,
            _ => bound,
        };
        Some(Fact::new(DType::F32, dims).within(-bound, bound))
    }
}
