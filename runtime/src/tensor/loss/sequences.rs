//! Losses of sequences whose alignment with their labels is unknown.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;

use super::Reduction;
use crate::ops::GraphBuilder;
use crate::tensor::{Tensor, check_index};

/// The logarithm of the probability of an impossible state: finite, so that no difference of two is
/// NaN, and far below any that is possible.
const IMPOSSIBLE: f32 = -1e30;

/// Options of [`Tensor::ctc`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Ctc<'t> {
    /// The class that stands for no label.
    pub blank: i32,
    /// The steps of each example, i32 `[n]`; all if `None`. Later steps count for nothing. No steps
    /// fit no labels, with a loss of 0. A length below 0 or beyond the steps fails the run.
    pub input_lengths: Option<Tensor<'t>>,
    /// The labels of each example, i32 `[n]`; all if `None`. Later labels may be any number. A length
    /// below 0 or beyond the labels fails the run.
    pub target_lengths: Option<Tensor<'t>>,
    /// Whether the loss of labels that do not fit into the steps is 0, with a gradient of 0, instead
    /// of infinite.
    pub zero_infinity: bool,
    /// How the losses of examples become one: a mean is that of the losses divided by the numbers
    /// of their labels, as in PyTorch.
    pub reduction: Reduction,
}

impl<'t> Tensor<'t> {
    /// −ln of the probability of the labels `[n, labels]` (i32), summed over all alignments with the
    /// steps of this tensor: logarithms of probabilities `[time, n, classes]` (f32), as
    /// [`log_softmax`](Tensor::log_softmax) gives them. Connectionist temporal classification
    /// (Graves et al. 2006), for speech and handwriting: an alignment names each label once or
    /// several times in a row, with blanks between equal labels and anywhere else.
    ///
    /// The forward recursion over the steps is unrolled, with `[n, 2·labels + 1]` numbers for each.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::tensor::Ctc;
    /// # let trace = Trace::training();
    /// # let (logits, labels) = (trace.input("x", F32, (20, 4, 30)), trace.input("y", I32, (4, 6)));
    /// # let lengths = trace.input("lengths", I32, (4,));
    /// let options = Ctc { target_lengths: Some(lengths), ..Ctc::default() };
    /// let loss = logits.log_softmax(2).ctc(labels, options);
    /// ```
    #[doc(alias = "ctc_loss")]
    #[track_caller]
    pub fn ctc(self, labels: Tensor<'t>, options: Ctc<'t>) -> Tensor<'t> {
        let at = Location::caller();
        let mut given = vec![self, labels];
        given.extend(options.input_lengths);
        given.extend(options.target_lengths);
        let mut sizes = [0; 2];
        let x = self.trace.record(at, &given, |g, ids| {
            let (x, y) = (g.dims(ids[0]), g.dims(ids[1]));
            let say = |why: String| {
                let (x, y) = (g.symbols.show(x), g.symbols.show(y));
                Err(format!(
                    "ctc of {} {x} by labels {} {y}: {why}",
                    g.dtype(ids[0]),
                    g.dtype(ids[1])
                ))
            };
            let types = (g.dtype(ids[0]), g.dtype(ids[1])) == (DType::F32, DType::I32);
            let (&[time, n, classes], &[of, count]) = (x.as_slice(), y.as_slice()) else {
                return say("[time, n, classes] and [n, labels] are needed".into());
            };
            let fixed = [time, count].map(|d| d.as_fixed().and_then(|d| usize::try_from(d).ok()));
            let [Some(time), Some(count)] = fixed else {
                return say("the numbers of steps and of labels must be fixed".into());
            };
            if !types || of != n || time == 0 {
                return say(
                    "f32 [time, n, classes] of a step or more and i32 [n, labels] are needed"
                        .into(),
                );
            }
            let blank = i64::from(options.blank);
            if blank < 0 || classes.as_fixed().is_some_and(|classes| blank >= classes) {
                return say(format!(
                    "{blank} is no class, so it cannot stand for no label"
                ));
            }
            for &lengths in &ids[2..] {
                if g.dtype(lengths) != DType::I32 || g.dims(lengths).as_slice() != [n] {
                    return say(format!(
                        "lengths {} {}: i32, one for each example, are needed",
                        g.dtype(lengths),
                        g.symbols.show(g.dims(lengths))
                    ));
                }
            }
            // Others would count as all steps, or as labels that do not fit.
            let given = [
                (options.input_lengths, time),
                (options.target_lengths, count),
            ];
            let given = given.iter().filter(|(lengths, _)| lengths.is_some());
            for (&lengths, &(_, most)) in ids[2..].iter().zip(given) {
                check_index(g, lengths, Size::fixed(most as i64 + 1));
            }
            sizes = [time, count];
            Ok(ids[0])
        });
        if x.is_poisoned() {
            return x;
        }
        self.trace.on_behalf(at, || {
            let losses = x.alignments(labels, sizes, &options);
            let impossible = losses.ge(-IMPOSSIBLE / 2.0);
            let otherwise = match options.zero_infinity {
                true => 0.0,
                false => f32::INFINITY,
            };
            let losses = impossible.select(otherwise, losses);
            match (options.reduction, options.target_lengths) {
                (Reduction::Mean, Some(lengths)) => {
                    (losses / lengths.cast(DType::F32).maximum(1.0)).mean_loss("ctc")
                }
                (Reduction::Mean, None) => (losses / sizes[1].max(1) as f32).mean_loss("ctc"),
                (by, _) => losses.reduced("ctc", by),
            }
        })
    }

    /// −ln of the probability of the labels of each example.
    #[track_caller]
    fn alignments(
        self,
        labels: Tensor<'t>,
        [time, count]: [usize; 2],
        options: &Ctc<'t>,
    ) -> Tensor<'t> {
        let trace = self.trace;
        let labels = match options.target_lengths {
            Some(lengths) => {
                let real = trace.arange(count).lt(lengths.unsqueeze(1));
                real.select(labels, options.blank)
            }
            None => labels,
        };
        // Blanks around all labels: [n, states].
        let blanks = trace.record(Location::caller(), &[labels], |g, ids| {
            let dims = g.dims(ids[0]).clone();
            Ok(g.full(options.blank as f32, DType::I32, &dims))
        });
        let pairs = trace.stack(&[blanks, labels], 2).flatten(1);
        let path = match count {
            0 => trace.full(0.0, DType::I32, (1, 1)) + options.blank,
            _ => trace.concat(&[pairs, blanks.slice(1, ..1)], 1),
        };
        let states = 2 * count + 1;
        let shifted = |x: Tensor<'t>, by: usize| {
            x.slice(1, ..states.saturating_sub(by))
                .pad([(0, 0), (by.min(states), 0)], IMPOSSIBLE)
        };
        // A blank may be left out between different labels.
        let differs = (2..states).map(|state| {
            let [here, before] = [state, state - 2].map(|s| path.slice(1, s..s + 1));
            here.not_equal(before)
        });
        let differs: Vec<Tensor<'t>> = differs.collect();
        let skips = (!differs.is_empty()).then(|| {
            let none = path.slice(1, ..2).not_equal(path.slice(1, ..2));
            trace.concat(&[&[none], differs.as_slice()].concat(), 1)
        });
        let state = trace.arange(states);
        let mut sums: Option<Tensor<'t>> = None;
        for step in 0..time {
            let now = self.slice(0, step..step + 1).squeeze(0).along_path(path);
            // A probability of 0, whose logarithm is −∞, is that of an impossible state.
            let now = now.maximum(IMPOSSIBLE);
            let (before, next) = match sums {
                // It begins with a blank or the first label; without a step, in the first state.
                None => (
                    state.equal(0).select(0.0, IMPOSSIBLE),
                    state.lt(2).select(now, IMPOSSIBLE),
                ),
                Some(before) => {
                    let mut ways = vec![before];
                    ways.extend((states > 1).then(|| shifted(before, 1)));
                    ways.extend(skips.map(|skips| skips.select(shifted(before, 2), IMPOSSIBLE)));
                    (before, log_sum(&ways) + now)
                }
            };
            sums = Some(match options.input_lengths {
                Some(lengths) => lengths.gt(step as i32).unsqueeze(1).select(next, before),
                None => next,
            });
        }
        let Some(sums) = sums else { return self };
        // It ends with the last label or the blank after it.
        let last = match options.target_lengths {
            Some(lengths) => (lengths * 2).unsqueeze(1),
            None => trace.full(2.0 * count as f32, DType::I32, (1, 1)),
        };
        let ends = [last, last - 1].map(|end| {
            let mine = state.equal(end);
            mine.select(sums, IMPOSSIBLE)
        });
        let ways = ends.map(|way| {
            // One state at most is not impossible.
            way.max_over(1)
        });
        -log_sum(&ways)
    }

    /// The elements `[n, states]` of this tensor `[n, classes]` at the classes of a path, of which
    /// one row may stand for all examples.
    #[track_caller]
    fn along_path(self, path: Tensor<'t>) -> Tensor<'t> {
        let index = self
            .trace
            .record(Location::caller(), &[path, self], |g, ids| {
                let mut dims = g.dims(ids[0]).clone();
                dims[0] = g.dims(ids[1])[0];
                Ok(g.broadcast(ids[0], &dims))
            });
        self.gather(1, index)
    }
}

/// ln Σ eˣ of a few tensors.
#[track_caller]
fn log_sum<'t>(ways: &[Tensor<'t>]) -> Tensor<'t> {
    let [first, rest @ ..] = ways else {
        unreachable!("one way at least")
    };
    let highest = rest.iter().fold(*first, |a, b| a.maximum(*b)).detach();
    let sum = rest.iter().fold((*first - highest).exp(), |sum, way| {
        sum + (*way - highest).exp()
    });
    highest + sum.ln()
}
