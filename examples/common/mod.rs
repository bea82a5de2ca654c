//! Options and reports that the training examples share.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use slabwise::data::{Mnist, Split};
use slabwise::prelude::*;
use slabwise::{Error, World};
use slabwise_planner::shortened;

/// The options of an example that learns MNIST.
#[allow(dead_code, reason = "not every example learns from images in epochs")]
#[derive(Parser)]
pub struct Args {
    /// Passes over the 60,000 training images
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    epochs: Option<u32>,
    /// Images in a step
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub batch: u32,
    /// The folder of the four MNIST (or Fashion-MNIST) files; the one that comes with the project
    /// unless given
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    #[command(flatten)]
    images: Images,
    #[command(flatten)]
    pub run: Run,
}

/// The option of examples that may learn from a part of their images.
#[derive(clap::Args)]
pub struct Images {
    /// Use only so many of the training images and of the test images
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    images: Option<u32>,
}

#[allow(dead_code, reason = "not every example learns from images")]
impl Images {
    /// As many of the first images as were asked for.
    pub fn of(&self, train: Split, test: Split) -> (Split, Split) {
        let most = self.images.map_or(usize::MAX, |n| n as usize);
        (train.first(most), test.first(most))
    }
}

/// The options of every example that trains.
#[derive(clap::Args)]
pub struct Run {
    /// The seed of weights and of the order of the data
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Threads kernels use; SLABWISE_THREADS or one for each core unless given
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    device: Device,
    /// Write weights and optimizer state to this file (safetensors) after every epoch
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Continue from a file that --save wrote, as if there had been no interruption
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// The most bytes that weights, optimizer state and slab may take, such as 24MiB, or a part of
    /// the slab needed without recomputation, such as 50%
    #[arg(long)]
    budget: Option<Budget>,
    /// Write the plan of the training step as a picture (SVG)
    #[arg(long, value_name = "FILE")]
    plan_svg: Option<PathBuf>,
}

#[allow(dead_code, reason = "not every example learns from images in epochs")]
impl Args {
    /// The number of epochs; `usual` by default.
    pub fn epochs(&self, usual: u32) -> u32 {
        self.epochs.unwrap_or(usual)
    }

    /// The data set, or as many of its first images as were asked for.
    pub fn mnist(&self) -> Result<Mnist> {
        let folder = self.data.clone().unwrap_or_else(Mnist::default_dir);
        let Mnist { train, test } = Mnist::load(folder)?;
        let (train, test) = self.images.of(train, test);
        Ok(Mnist { train, test })
    }

    /// Prints the plan and loads the checkpoint to resume from, if any. Returns the epochs that
    /// remain of `epochs`, counted from 1.
    pub fn start(
        &self,
        session: &mut Session,
        train: &Program<1>,
        epochs: u32,
        steps: u32,
    ) -> Result<std::ops::RangeInclusive<u32>> {
        Ok(self.run.start_epochs(session, train, steps)? + 1..=epochs)
    }
}

impl Run {
    /// A session with these options.
    pub fn session(&self, params: Params) -> Result<Session> {
        let session = Session::new(self.device, params)?
            .with_budget(self.budget)
            .on(World::join()?)?;
        Ok(match self.threads {
            Some(threads) => session.with_threads(threads as usize),
            None => session,
        })
    }

    /// Prints the plan and loads the checkpoint to resume from, if any. Returns the number of
    /// completed steps.
    pub fn start(&self, session: &mut Session, train: &Program<1>) -> Result<u32> {
        if session.world().rank() == 0 {
            println!("{}", train.plan());
        }
        if let Some(path) = &self.plan_svg {
            train.plan().write_svg(path)?;
        }
        let Some(path) = &self.resume else {
            return Ok(0);
        };
        session
            .load(path)
            .map_err(|error| Error::Value(error.to_string()))?;
        let done = session
            .value("optim.step")?
            .first()
            .map_or(0, |&completed| completed as u32);
        if session.world().rank() == 0 {
            println!("resumed after step {done} from {}", path.display());
        }
        Ok(done)
    }

    /// [`Run::start`] of a training in epochs of so many steps. Returns the number of completed
    /// epochs.
    #[allow(dead_code, reason = "not every example learns in epochs of images")]
    pub fn start_epochs(
        &self,
        session: &mut Session,
        train: &Program<1>,
        steps: u32,
    ) -> Result<u32> {
        let done = self.start(session, train)?;
        if !done.is_multiple_of(steps) {
            return Err(Error::Value(format!(
                "the checkpoint has {done} steps, which are no whole epochs of {steps}; resume with the --batch and --images that it was saved with"
            )));
        }
        Ok(done / steps)
    }

    /// Saves weights and optimizer state if `--save` is given. If the process is killed meanwhile,
    /// the earlier file stays whole.
    pub fn checkpoint(&self, session: &Session) -> Result<()> {
        self.save.as_ref().map_or(Ok(()), |path| session.save(path))
    }
}

/// The results of one epoch, which are printed at its end.
#[allow(dead_code, reason = "some examples leave the loop to the library")]
pub struct Epoch {
    number: u32,
    start: Instant,
    trained: Duration,
    images: usize,
    loss: f64,
}

#[allow(dead_code, reason = "some examples leave the loop to the library")]
impl Epoch {
    /// Starts an epoch.
    pub fn new(number: u32) -> Self {
        Epoch {
            number,
            start: Instant::now(),
            trained: Duration::ZERO,
            images: 0,
            loss: 0.0,
        }
    }

    /// Records a training step.
    pub fn step(&mut self, images: usize, loss: f32) {
        self.images += images;
        self.loss += f64::from(loss) * images as f64;
        self.trained = self.start.elapsed();
    }

    /// Ends the epoch and prints its results; `correct` of the test images were classified
    /// correctly.
    pub fn end(self, correct: f32, tested: usize) {
        println!(
            "epoch {}: mean loss {:.4}, {:.2} % of {tested} test images right, {:.0} images/s, {:.1} s",
            self.number,
            self.loss / self.images.max(1) as f64,
            f64::from(correct) / tested.max(1) as f64 * 100.0,
            self.images as f64 / self.trained.as_secs_f64().max(1e-9),
            self.start.elapsed().as_secs_f64()
        );
    }
}

/// Most characters of a line of an error.
const LINE_MAX: usize = 2000;

/// The exit code, as of the command line: 2 for invalid options and files, 1 for other failures.
/// Writes the error to stderr; text that it quotes from files is escaped, so that it cannot control
/// the terminal.
pub fn exit(result: Result<()>) -> ExitCode {
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    format!("error: {error}")
        .lines()
        .for_each(|line| eprintln!("{}", shortened(line, LINE_MAX)));
    if matches!(error, Error::DataFile(_) | Error::Value(_)) {
        ExitCode::from(2)
    } else {
        ExitCode::FAILURE
    }
}
