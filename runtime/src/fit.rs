//! A training loop with callbacks, as an alternative to writing one.
//!
//! ```
//! use slabwise::fit::{Better, Fit};
//! use slabwise::nn::Linear;
//! use slabwise::optim::Adam;
//! use slabwise::prelude::*;
//! use ndarray::Array2;
//!
//! /// Of a batch of eight.
//! fn loss<'t>(trace: &'t Trace, layer: &Linear) -> Tensor<'t> {
//!     let (x, y) = (trace.input("x", F32, (8, 2)), trace.input("y", F32, (8, 1)));
//!     x.apply(layer).mse(y)
//! }
//!
//! let params = Params::seeded(1);
//! let layer = Linear::new(&params.root() / "layer", 2, 1);
//! let mut session = Session::new(Device::auto(), params)?;
//! let trace = Trace::training();
//! let error = loss(&trace, &layer);
//! trace.minimize(error, Adam::new(0.05));
//! let train = session.compile(&trace, [error])?;
//! let trace = Trace::inference();
//! let judge = session.compile(&trace, [loss(&trace, &layer)])?;
//!
//! // y = x₀ − x₁
//! let batch = |seed: usize| {
//!     let x = Array2::from_shape_fn((8, 2), |(i, j)| ((seed * 16 + i * 2 + j) % 7) as f32 / 7.0);
//!     let y = Array2::from_shape_fn((8, 1), |(i, _)| x[[i, 0]] - x[[i, 1]]);
//!     (x, y)
//! };
//! let fitted = Fit::new(&train)
//!     .epochs(50)
//!     .validate(&judge, Better::Lower, || [batch(100)])
//!     .patience(5)
//!     .on_epoch(|_, epoch| {
//!         println!("epoch {}: {:.4}, validation {:?}", epoch.number, epoch.loss, epoch.validation);
//!         Ok(())
//!     })
//!     .run(&mut session, |epoch| (0..20).map(move |step| batch(epoch as usize * 20 + step)))?;
//! assert!(fitted.best().is_some_and(|epoch| epoch.validation < Some(1e-3)));
//! # Ok::<(), slabwise::Error>(())
//! ```

use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use crate::buffer::Output;
use crate::data::{Dataset, Loader};
use crate::error::{Error, Result};
use crate::feed::Feed;
use crate::program::Program;
use crate::session::{BestEpoch, Session};
use crate::world::World;

/// A step that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Its epoch, from 1.
    pub epoch: u32,
    /// Its number in the epoch, from 1.
    pub number: u64,
    /// The program's first output.
    pub loss: f32,
    /// The length of the first input.
    pub examples: usize,
    stop: bool,
}

impl Step {
    /// Ends training now: this epoch is cut short, but validated and saved as any other. In a
    /// [world](Session::on), one rank that does so ends it after this step on all of them.
    pub fn stop(&mut self) {
        self.stop = true;
    }
}

/// An epoch that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Epoch {
    /// Its number, from 1.
    pub number: u32,
    /// Steps made.
    pub steps: u64,
    /// The mean of the steps' losses, weighted by their examples.
    pub loss: f64,
    /// The result of the validation, if there is one: in a [world](Session::on), its mean over all
    /// ranks.
    pub validation: Option<f64>,
    /// Whether no epoch before was validated as well.
    pub is_best: bool,
    /// Seconds it took, validation included.
    pub seconds: f64,
    stop: bool,
}

impl Epoch {
    /// Ends training after this epoch. In a [world](Session::on), one rank that does so ends it on
    /// all of them.
    pub fn stop(&mut self) {
        self.stop = true;
    }
}

/// Which of two validations is the better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Lower values are better, such as for a loss.
    Lower,
    /// Higher values are better, such as for an accuracy.
    Higher,
}

impl Better {
    /// Whether `new` is better than `old`. NaN is never better.
    fn holds(self, new: f64, old: f64) -> bool {
        match self {
            _ if old.is_nan() => !new.is_nan(),
            Better::Lower => new < old,
            Better::Higher => new > old,
        }
    }
}

/// Why training ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All epochs were made.
    Epochs,
    /// A callback stopped it.
    Stopped,
    /// The validation did not improve for as many epochs as the patience.
    Patience,
}

/// The result of training.
#[derive(Clone, Debug, PartialEq)]
pub struct Fitted {
    /// Every epoch, in order.
    pub epochs: Vec<Epoch>,
    /// Why it ended.
    pub end: End,
}

impl Fitted {
    /// The epoch with the best validation, if there was one.
    pub fn best(&self) -> Option<&Epoch> {
        self.epochs.iter().rev().find(|epoch| epoch.is_best)
    }
}

type Callback<'a, Event> = Box<dyn FnMut(&mut Session, &mut Event) -> Result<()> + 'a>;
type Judge<'a> = Box<dyn FnMut(&mut Session) -> Result<f64> + 'a>;

/// A training loop to run: which program, for how long, and with which callbacks. See [the
/// module](crate::fit).
pub struct Fit<'a, const N: usize> {
    program: &'a Program<N>,
    first: u32,
    epochs: u32,
    on_step: Vec<Callback<'a, Step>>,
    on_epoch: Vec<Callback<'a, Epoch>>,
    validation: Option<(Better, Judge<'a>)>,
    patience: Option<u32>,
    latest: Option<PathBuf>,
    best: Option<PathBuf>,
}

impl<'a, const N: usize> Fit<'a, N> {
    /// One epoch of a training program, whose first output is the loss.
    pub fn new(program: &'a Program<N>) -> Self {
        Fit {
            program,
            first: 1,
            epochs: 1,
            on_step: Vec::new(),
            on_epoch: Vec::new(),
            validation: None,
            patience: None,
            latest: None,
            best: None,
        }
    }

    /// Up to the epoch of this number; epochs count from 1.
    pub fn epochs(mut self, epochs: u32) -> Self {
        self.epochs = epochs;
        self
    }

    /// Begins with the epoch of this number, to go on after [loading](Session::load) a checkpoint
    /// of the epoch before. The best validation and its epoch are part of a checkpoint, so that a
    /// resumed training decides which epoch is the best, and when its patience ends, as one that was
    /// not interrupted.
    pub fn from_epoch(mut self, first: u32) -> Self {
        self.first = first.max(1);
        self
    }

    /// Calls this after every step.
    pub fn on_step(mut self, call: impl FnMut(&mut Session, &mut Step) -> Result<()> + 'a) -> Self {
        self.on_step.push(Box::new(call));
        self
    }

    /// Calls this after every epoch, when it was validated and before it is saved, so that a
    /// checkpoint has what the call sets, such as the rate of a [plateau](crate::optim::Plateau).
    pub fn on_epoch(
        mut self,
        call: impl FnMut(&mut Session, &mut Epoch) -> Result<()> + 'a,
    ) -> Self {
        self.on_epoch.push(Box::new(call));
        self
    }

    /// Validates every epoch by the [mean](Session::mean) of a program's first output over these
    /// batches. Where labels are ignored, [`Fit::validate_by`] the
    /// [mean of sums](Session::mean_of_sums).
    pub fn validate<const M: usize, B>(
        self,
        program: &'a Program<M>,
        better: Better,
        mut batches: impl FnMut() -> B + 'a,
    ) -> Self
    where
        B: IntoIterator,
        B::Item: Feed,
    {
        self.validate_by(better, move |session| session.mean(program, batches()))
    }

    /// Validates every epoch by this function's result. In a [world](Session::on) every rank
    /// validates, on rows of its own or on the same ones, and the mean of the ranks' results counts,
    /// so that all of them decide alike. Ranks with other numbers of rows count the same, unless the
    /// program gives the [mean over ranks](crate::Tensor::mean_over_ranks).
    pub fn validate_by(
        mut self,
        better: Better,
        judge: impl FnMut(&mut Session) -> Result<f64> + 'a,
    ) -> Self {
        self.validation = Some((better, Box::new(judge)));
        self
    }

    /// Early stopping: ends training when this many epochs in a row were not better than the best
    /// before.
    pub fn patience(mut self, epochs: u32) -> Self {
        self.patience = Some(epochs);
        self
    }

    /// Saves weights and state to this file after every epoch.
    pub fn checkpoint(mut self, path: impl Into<PathBuf>) -> Self {
        self.latest = Some(path.into());
        self
    }

    /// Saves weights and state to this file after every epoch that is the best so far.
    pub fn checkpoint_best(mut self, path: impl Into<PathBuf>) -> Self {
        self.best = Some(path.into());
        self
    }

    /// Trains on the batches that `data` gives for the number of each epoch.
    ///
    /// # Errors
    /// Any error of a step, a callback, the validation or saving; a loss that is not finite, with
    /// its step; an epoch without batches; patience, or a checkpoint of the best, without a
    /// validation. In a [world](Session::on): [`Error::Peer`] with such an error of another rank, and
    /// ranks that do not have equally many batches.
    pub fn run<B>(self, session: &mut Session, mut data: impl FnMut(u32) -> B) -> Result<Fitted>
    where
        B: IntoIterator,
        B::Item: Feed,
    {
        self.try_run(session, |epoch| data(epoch).into_iter().map(Ok::<_, Error>))
    }

    /// Trains on the batches of a [loader](crate::data::Loader), which may fail. Epochs count from
    /// 1, for the loader from the same number.
    ///
    /// ```no_run
    /// # use slabwise::{Fit, data::{Dataset, Mnist}, prelude::*};
    /// # fn train(program: &Program<1>, session: &mut Session) -> Result<()> {
    /// let mnist = Mnist::load(Mnist::default_dir())?;
    /// let loader = mnist.train.batch(64).shuffle(1).drop_last().workers(2);
    /// Fit::new(program).epochs(5).run_loader(session, &loader)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`Fit::run`], and the first of a batch.
    pub fn run_loader<D, B>(self, session: &mut Session, loader: &Loader<D, B>) -> Result<Fitted>
    where
        D: Dataset + 'static,
        B: Feed + Send + 'static,
    {
        self.try_run(session, |epoch| loader.epoch(epoch.into()))
    }

    /// [`Fit::run`] on batches that may fail.
    ///
    /// # Errors
    /// Those of [`Fit::run`], and the first of a batch.
    pub fn try_run<B, F, E>(
        mut self,
        session: &mut Session,
        mut data: impl FnMut(u32) -> B,
    ) -> Result<Fitted>
    where
        B: IntoIterator<Item = std::result::Result<F, E>>,
        F: Feed,
        Error: From<E>,
    {
        if self.validation.is_none() && (self.patience.is_some() || self.best.is_some()) {
            return Err(Error::Value(
                "fit: the best epoch is decided by a validation, and none is given".into(),
            ));
        }
        let mut fitted = Fitted {
            epochs: Vec::new(),
            end: End::Epochs,
        };
        let first = self.first;
        let mut best = session.variables.best_epoch.filter(|b| b.number < first);
        for number in self.first..=self.epochs {
            let started = Instant::now();
            let mut epoch = self.train(session, number, data(number))?;
            let ended = format_args!("epoch {number}");
            if let Some((better, judge)) = &mut self.validation {
                let judged = judge(session);
                let (own, _) = share(&session.world, judged, |_| GO, ended)?;
                let validation = session.world.mean(own)?;
                epoch.validation = Some(validation);
                epoch.is_best = best.is_none_or(|best| better.holds(validation, best.validation));
                if epoch.is_best {
                    best = Some(BestEpoch { number, validation });
                }
            }
            session.variables.best_epoch = best;
            epoch.seconds = started.elapsed().as_secs_f64();
            let mut calls = self.on_epoch.iter_mut();
            let called = calls.try_for_each(|call| call(session, &mut epoch));
            let code = if epoch.stop { STOP } else { GO };
            let ((), all) = share(&session.world, called, |()| code, ended)?;
            let stopped = all.contains(&STOP);
            let best_path = self.best.as_ref().filter(|_| epoch.is_best);
            let mut paths = self.latest.iter().chain(best_path);
            let saved = paths.try_for_each(|path| session.save(path));
            share(&session.world, saved, |()| GO, ended)?;
            fitted.epochs.push(epoch);
            let waited = best.map_or(0, |best| number - best.number);
            if stopped
                || self
                    .patience
                    .is_some_and(|patience| waited > 0 && waited >= patience)
            {
                fitted.end = if stopped { End::Stopped } else { End::Patience };
                break;
            }
        }
        Ok(fitted)
    }

    /// The steps of one epoch.
    fn train<B, F, E>(&mut self, session: &mut Session, epoch: u32, batches: B) -> Result<Epoch>
    where
        B: IntoIterator<Item = std::result::Result<F, E>>,
        F: Feed,
        Error: From<E>,
    {
        let mut mean = Mean::default();
        let mut batches = batches.into_iter();
        let mut steps = 0;
        // Whether a callback of the step before has stopped training, or its error.
        let mut stopped = Ok(false);
        let stop = loop {
            let number = steps + 1;
            let next = stopped.and_then(|stopped| match stopped {
                true => Ok(Next::Stop),
                false => Ok(match batches.next() {
                    Some(batch) => Next::Step(batch?),
                    None => Next::End,
                }),
            });
            let place = format_args!("step {number} of epoch {epoch}");
            let (next, all) = share(&session.world, next, Next::code, place)?;
            if all.contains(&STOP) {
                break true;
            }
            if let Some(without) = all.iter().position(|code| *code == END)
                && let Some(with) = all.iter().position(|code| *code == GO)
            {
                return Err(Error::Value(format!(
                    "fit: rank {without} of {} has no batch for {place}, and rank {with} has one; give all ranks equally many batches",
                    all.len()
                )));
            }
            let Next::Step(batch) = next else {
                break false;
            };
            let examples = self.program.inner.examples(&batch)?;
            let loss = first(session.run(self.program, &batch)?)?;
            steps = number;
            mean.add(loss, examples);
            let mut step = Step {
                epoch,
                number,
                loss,
                examples,
                stop: false,
            };
            stopped = self.end_step(session, &mut step).map(|()| step.stop);
        };
        let loss = mean
            .value()
            .ok_or_else(|| Error::Value(format!("fit: epoch {epoch} has no batches")))?;
        Ok(Epoch {
            number: epoch,
            steps,
            loss,
            validation: None,
            is_best: false,
            seconds: 0.0,
            stop,
        })
    }

    /// Checks the loss of a step, and calls its callbacks.
    fn end_step(&mut self, session: &mut Session, step: &mut Step) -> Result<()> {
        let Step {
            epoch,
            number,
            loss,
            ..
        } = *step;
        if !loss.is_finite() {
            return Err(Error::Value(format!(
                "fit: the loss of step {number} in epoch {epoch} is {loss}; a smaller learning rate, or clipping gradients by their norm, would help"
            )));
        }
        let mut calls = self.on_step.iter_mut();
        calls.try_for_each(|call| call(session, step))
    }
}

/// The next action of a rank in an epoch.
enum Next<F> {
    /// A step with this batch.
    Step(F),
    /// No step: there are no more batches.
    End,
    /// No step: a callback has stopped training.
    Stop,
}

impl<F> Next<F> {
    fn code(&self) -> u8 {
        match self {
            Next::Step(_) => GO,
            Next::End => END,
            Next::Stop => STOP,
        }
    }
}

/// The codes by which ranks tell each other how they go on; the last precedes an error's text.
const GO: u8 = 0;
const END: u8 = 1;
const STOP: u8 = 2;
const FAILED: u8 = 3;

/// Shows the other ranks how this one goes on, or its error, which ends training on all of them; its
/// result, and the codes of all ranks.
///
/// # Errors
/// This rank's own, else [`Error::Peer`] with that of the first rank that has one, or of a lost rank.
fn share<T>(
    world: &World,
    own: Result<T>,
    code: impl FnOnce(&T) -> u8,
    place: fmt::Arguments<'_>,
) -> Result<(T, Vec<u8>)> {
    if world.ranks() == 1 {
        return own.map(|own| {
            let code = code(&own);
            (own, vec![code])
        });
    }
    let message = match &own {
        Ok(own) => vec![code(own)],
        Err(error) => [&[FAILED], error.to_string().as_bytes()].concat(),
    };
    let all = world.gather(&message);
    let (own, all) = (own?, all?);
    if let Some((rank, [_, error @ ..])) = all
        .iter()
        .map(Vec::as_slice)
        .enumerate()
        .find(|(_, message)| message.first() == Some(&FAILED))
    {
        return Err(Error::Peer(format!(
            "fit: rank {rank} of {} has failed in {place}: {}",
            all.len(),
            String::from_utf8_lossy(error)
        )));
    }
    Ok((own, all.concat()))
}

/// The number that a run's first output is.
fn first<const N: usize>(outputs: [Output<'_>; N]) -> Result<f32> {
    outputs.first().map_or_else(
        || {
            Err(Error::Value(
                "a program without outputs has none to take the mean of".into(),
            ))
        },
        Output::scalar,
    )
}

/// A mean in which each value is weighted by its examples.
#[derive(Default)]
struct Mean {
    sum: f64,
    examples: f64,
    values: u64,
}

impl Mean {
    fn add(&mut self, value: f32, examples: usize) {
        self.sum += f64::from(value) * examples as f64;
        self.examples += examples as f64;
        self.values += 1;
    }

    /// `None` if there was no value.
    fn value(&self) -> Option<f64> {
        (self.values > 0).then(|| self.sum / self.examples)
    }
}

impl Session {
    /// Runs a program on every batch and gives the mean of its first output, an f32 scalar that is
    /// itself a mean over the batch: each batch counts as often as its first input is long. A mean
    /// over other elements, such as labels that are not
    /// [ignored](crate::tensor::CrossEntropy::ignore), is that of [`Session::mean_of_sums`].
    ///
    /// # Errors
    /// Any error of [`Session::run`]; an output that is not an f32 scalar; no batches.
    pub fn mean<const N: usize, B>(&mut self, program: &Program<N>, batches: B) -> Result<f64>
    where
        B: IntoIterator,
        B::Item: Feed,
    {
        let mut mean = Mean::default();
        for batch in batches {
            let examples = program.inner.examples(&batch)?;
            mean.add(first(self.run(program, &batch)?)?, examples);
        }
        mean.value().ok_or_else(|| {
            Error::Value(format!(
                "\"{}\" was given no batches to take the mean of",
                program.plan().name()
            ))
        })
    }

    /// Runs a program on every batch and gives the sum of its first output divided by the sum of its
    /// second: of sums and the numbers of their elements, the mean over the elements of all batches,
    /// however many each has. Both are f32 scalars.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// use slabwise::tensor::{CrossEntropy, Reduction};
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// let trace = Trace::inference();
    /// let (logits, labels) = (trace.input("x", F32, (4, 3)), trace.input("labels", I32, (4,)));
    /// let options = CrossEntropy {
    ///     ignore: Some(-100),
    ///     reduction: Reduction::Sum,
    ///     ..CrossEntropy::default()
    /// };
    /// let loss = logits.cross_entropy_with(labels, options);
    /// let judge = session.compile(&trace, [loss, labels.not_equal(-100).cast(F32).sum()])?;
    /// # let x = ndarray::Array2::<f32>::zeros((4, 3));
    /// # let batches = || [(x.clone(), ndarray::arr1(&[0, -100, -100, 1]))];
    /// let mean = session.mean_of_sums(&judge, batches())?;
    /// # assert!((mean - 3f64.ln()).abs() < 1e-6);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// Any error of [`Session::run`]; an output that is not an f32 scalar; a second sum of 0.
    pub fn mean_of_sums<B>(&mut self, program: &Program<2>, batches: B) -> Result<f64>
    where
        B: IntoIterator,
        B::Item: Feed,
    {
        let (mut sum, mut elements) = (0.0, 0.0);
        for batch in batches {
            let [part, number] = self.run(program, &batch)?;
            sum += f64::from(part.scalar()?);
            elements += f64::from(number.scalar()?);
        }
        if elements == 0.0 {
            return Err(Error::Value(format!(
                "\"{}\" was given no elements to take the mean of",
                program.plan().name()
            )));
        }
        Ok(sum / elements)
    }
}
