//! `slabwise launch`: a program on several ranks.

use std::ffi::OsString;
use std::process::ExitCode;

use slabwise_comm::launch::{self, Launch};

use crate::output::complain;

#[derive(clap::Args)]
pub struct Args {
    /// The number of ranks
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u16).range(1..))]
    ranks: u16,
    /// How often a run of which a rank fails is started again
    #[arg(long, default_value_t = 0)]
    restarts: u16,
    /// The program and its arguments, after --
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

#[derive(clap::Args)]
pub struct GuardArgs {
    /// The program and its arguments, after --
    #[arg(last = true, required = true)]
    program: Vec<OsString>,
}

/// The exit code is that of the ranks; without MPI it is 1.
pub fn run(args: &Args) -> ExitCode {
    let this = match std::env::current_exe() {
        Ok(this) => this.into_os_string(),
        Err(error) => return failed(format!("the path of this program is unknown: {error}")),
    };
    let launch = Launch {
        ranks: args.ranks.into(),
        restarts: args.restarts.into(),
        program: args.program.clone(),
        guard: vec![this, "guard".into(), "--".into()],
        library: None,
    };
    launch.run().map_or_else(failed, ExitCode::from)
}

/// Runs a rank's program; the exit code is the program's.
pub fn guard(args: &GuardArgs) -> ExitCode {
    launch::guard(&args.program).map_or_else(failed, ExitCode::from)
}

fn failed(why: impl std::fmt::Display) -> ExitCode {
    complain(why);
    ExitCode::FAILURE
}
