//! `slabwise replay`: a trace of allocations and frees through a pool's policies.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Value, json};
use slabwise::memory::replay::{Replay, ReplayError, Trace};
use slabwise::memory::{MemoryConfig, Policy, Pool, export};
use slabwise::{Bytes, Error, Result};

use slabwise_planner::{brief, table};

use crate::output::{bad_input, complain, line, save};

#[derive(clap::Args)]
pub struct Args {
    /// RMM's CSV log, a memory snapshot of PyTorch (pickle or JSON), or lifetimes
    /// (`id,lower,upper,size`); gzipped or not
    trace: PathBuf,
    /// The policy: tlsf, bfc, naive, round, unpooled, platform, async or vmm [default: that of the
    /// environment, else tlsf]
    #[arg(long, conflicts_with = "all")]
    policy: Option<Policy>,
    /// Every policy
    #[arg(long)]
    all: bool,
    /// Bytes of the device, such as 24GiB, or a multiple of the trace's peak, such as 1.02x;
    /// without, there is no limit
    #[arg(long, value_name = "BYTES", value_parser = capacity)]
    capacity: Option<Capacity>,
    /// Never move blocks
    #[arg(long)]
    no_defragment: bool,
    /// Write the pool at the trace's peak, and the events before, as a memory snapshot of PyTorch:
    /// JSON if the name ends in .json, else a pickle
    #[arg(long, value_name = "FILE", conflicts_with = "all")]
    pub snapshot: Option<PathBuf>,
    /// Write the events up to the trace's peak for Perfetto (JSON)
    #[arg(long, value_name = "FILE", conflicts_with = "all")]
    pub perfetto: Option<PathBuf>,
    /// One JSON object instead of a table (with --all, an array of them)
    #[arg(long)]
    json: bool,
}

/// The bytes of the device that a trace is replayed on.
#[derive(Clone, Copy, Debug)]
enum Capacity {
    Bytes(u64),
    OfPeak(f64),
}

fn capacity(text: &str) -> std::result::Result<Capacity, String> {
    match text.strip_suffix('x') {
        Some(factor) => {
            let factor: f64 = factor
                .parse()
                .map_err(|_| format!("`{}` is not a multiple of the peak", brief(text)))?;
            if factor > 0.0 && factor <= 1e6 {
                Ok(Capacity::OfPeak(factor))
            } else {
                Err(format!(
                    "`{}` is not above 0x, or above 1000000x",
                    brief(text)
                ))
            }
        }
        None => text
            .parse::<Bytes>()
            .map(|bytes| Capacity::Bytes(bytes.0))
            .map_err(|e| e.to_string()),
    }
}

/// A malformed trace gives exit code 2; one for which a policy has no memory gives 1 (with --all:
/// if none has).
pub fn run(args: &Args) -> Result<ExitCode> {
    let trace = match Trace::read_file(&args.trace) {
        Ok(trace) => trace,
        Err(error) => return bad_input(error),
    };
    let capacity = args.capacity.map(|capacity| match capacity {
        Capacity::Bytes(bytes) => bytes,
        Capacity::OfPeak(factor) => (trace.peak_live_bytes() as f64 * factor).ceil() as u64,
    });
    let policies: Vec<Option<Policy>> = if args.all {
        Policy::ALL.map(Some).to_vec()
    } else {
        vec![args.policy]
    };
    let mut replays = Vec::new();
    for policy in policies {
        let config = MemoryConfig {
            policy,
            defragment: args.no_defragment.then_some(false),
            ..MemoryConfig::default()
        };
        let events = if args.snapshot.is_some() || args.perfetto.is_some() {
            usize::MAX
        } else {
            0
        };
        let mut written = Ok(());
        let replay = trace.watch(&config, capacity, events, |pool| {
            written = write(args, pool)
        });
        written?;
        match replay {
            Err(ReplayError::Config(error)) => return bad_input(error),
            replay => replays.push((policy, replay)),
        }
    }
    if args.json {
        let reports: Vec<Value> = replays
            .iter()
            .filter(|(_, r)| args.all || r.is_ok())
            .map(|(p, r)| report(*p, r))
            .collect();
        if args.all {
            line(Value::Array(reports))?
        } else {
            reports.into_iter().try_for_each(line)?
        }
    } else if replays.iter().any(|(_, r)| r.is_ok()) {
        let peak = trace.peak_live_bytes();
        let of = capacity.map_or(String::new(), |bytes| {
            format!(
                " · {} of memory ({:.3} × peak)",
                Bytes(bytes),
                bytes as f64 / peak.max(1) as f64
            )
        });
        line(format_args!(
            "{} operations · peak live {}{of}",
            trace.ops().len(),
            Bytes(peak)
        ))?;
        line(table(&rows(&replays), 1))?;
    }
    for (policy, replay) in &replays {
        if let Err(error) = replay {
            let of = policy.map_or(String::new(), |p| format!("{p}: "));
            complain(format_args!("{}: {of}{error}", args.trace.display()));
        }
    }
    Ok(if replays.iter().any(|(_, r)| r.is_ok()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Writes the requested files.
fn write(args: &Args, pool: &Pool) -> Result<()> {
    let internal = |e: export::ExportError| Error::Internal(e.to_string());
    if let Some(path) = &args.snapshot {
        let json = path
            .extension()
            .is_some_and(|extension| extension == "json");
        let bytes = if json {
            export::snapshot_json(pool).map(String::into_bytes)
        } else {
            export::snapshot_pickle(pool)
        };
        save(path, &bytes.map_err(internal)?)?;
    }
    if let Some(path) = &args.perfetto {
        save(path, export::trace_events_json(pool).as_bytes())?;
    }
    Ok(())
}

fn report(policy: Option<Policy>, replay: &std::result::Result<Replay, ReplayError>) -> Value {
    match replay {
        Ok(r) => json!({
            "policy": r.policy.name(),
            "peak_live_bytes": r.peak_live_bytes,
            "peak_reserved_bytes": r.statistics.peak_pool_bytes,
            "fragmentation": r.fragmentation.by_largest,
            "ns_per_op": r.ns_per_op,
            "driver_calls": r.driver_calls,
            "defrags": r.statistics.defrags,
            "defrag_bytes": r.statistics.defrag_bytes,
        }),
        Err(error) => json!({ "policy": policy.map(Policy::name), "error": error.to_string() }),
    }
}

fn rows(
    replays: &[(Option<Policy>, std::result::Result<Replay, ReplayError>)],
) -> Vec<Vec<String>> {
    let head = [
        "policy",
        "reserved ÷ live",
        "reserved",
        "fragmentation",
        "ns/op",
        "driver calls",
        "moved",
        "bytes moved",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    for (policy, replay) in replays {
        rows.push(match replay {
            Ok(r) => vec![
                r.policy.to_string(),
                format!(
                    "{:.4}",
                    r.statistics.peak_pool_bytes as f64 / r.peak_live_bytes.max(1) as f64
                ),
                Bytes(r.statistics.peak_pool_bytes).to_string(),
                format!("{:.1} %", 100.0 * r.fragmentation.by_largest),
                format!("{:.0}", r.ns_per_op),
                r.driver_calls.to_string(),
                format!("{}×", r.statistics.defrags),
                Bytes(r.statistics.defrag_bytes).to_string(),
            ],
            Err(_) => vec![
                policy.map_or(String::new(), |p| p.to_string()),
                "out of memory".into(),
            ],
        });
    }
    rows
}
