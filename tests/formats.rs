//! Foreign readers read the exported files: Python's, and PyTorch's own viewer where
//! `SLABWISE_PEERS_PYTHON` names a Python that has it. Planned and dynamic runs export the same
//! formats. Without `python3` the tests are skipped, but on CI they fail.
#![cfg(feature = "profiles")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use slabwise::memory::export::{
    MemoryProfile, heap_profile, snapshot_json, snapshot_pickle, trace_events_json,
};
use slabwise::memory::replay::Trace;
use slabwise::memory::{FakeDevice, Handle, MemoryConfig, Policy, Pool, Stream, Tag};
use slabwise::{Device, Params, Session};
use slabwise_models::Model;

const KIB: u64 = 1 << 10;

/// The values that the readers must find.
struct Expected {
    in_use: u64,
    reserved: u64,
    blocks: usize,
    profile: u64,
}

/// Writes all formats and has the readers read them: the profile from `peak`, the others from
/// `memory`.
fn read_by_others(memory: &MemoryProfile, peak: &MemoryProfile, expected: &Expected) {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join(name), bytes).expect("written")
    };
    write(
        "memory.json",
        snapshot_json(memory.clone()).expect("JSON").as_bytes(),
    );
    write(
        "memory.pickle",
        &snapshot_pickle(memory.clone()).expect("a pickle"),
    );
    write(
        "memory.pb.gz",
        &heap_profile(peak.clone(), Duration::from_secs(7)).expect("a profile"),
    );
    write("trace.json", trace_events_json(memory.clone()).as_bytes());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/read_formats.py");
    let read = |python: &str, torch: bool| {
        let Expected {
            in_use,
            reserved,
            blocks,
            profile,
        } = *expected;
        let numbers = [in_use, reserved, blocks as u64, profile].map(|n| n.to_string());
        let output = Command::new(python)
            .arg(&script)
            .arg(folder.path())
            .args(numbers)
            .args(torch.then_some("torch"))
            .output()?;
        assert!(
            output.status.success(),
            "{python}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok::<(), std::io::Error>(())
    };
    match read("python3", false) {
        Err(error) if std::env::var_os("CI").is_some() => {
            panic!("CI reads exports with python3: {error}")
        }
        Err(error) => eprintln!("skipped: there is no python3 ({error})"),
        Ok(()) => {}
    }
    if let Ok(python) = std::env::var("SLABWISE_PEERS_PYTHON") {
        read(&python, true).expect("the Python that SLABWISE_PEERS_PYTHON names");
    }
}

#[test]
fn snapshots_of_a_pool_are_readable() {
    let device = FakeDevice::new(64 * KIB).with_preallocation(true);
    let config = MemoryConfig {
        fraction: Some(1.0),
        ..MemoryConfig::with_policy(Policy::Bfc)
    };
    let pool = Pool::new(&config).expect("settings that make sense");
    pool.record(usize::MAX);
    let here = std::panic::Location::caller();
    let take = |bytes: u64, name: &str| {
        device.advance(Duration::from_micros(3));
        let tag = Tag {
            name: name.into(),
            layer: "body/é \"conv\"".into(),
            location: Some(here),
        };
        pool.allocate(&mut &device, bytes, Stream(0), pool.tag(tag))
    };
    let blocks: Vec<Handle> = (0..8)
        .map(|k| take(8 * KIB - 100, ["even", "odd"][k % 2]).expect("room"))
        .collect();
    blocks
        .iter()
        .step_by(2)
        .for_each(|one| pool.free(&mut &device, *one).expect("in use"));
    take(64 * KIB, "too much").expect_err("half of it is in use");
    take(20 * KIB, "large").expect("room, once blocks are moved");
    let s = pool.statistics();
    assert_eq!((s.defrags, s.ooms), (1, 1));
    let memory = MemoryProfile::from(&pool);
    let expected = Expected {
        in_use: s.bytes_in_use,
        reserved: s.pool_bytes,
        blocks: 5,
        profile: s.bytes_in_use,
    };
    read_by_others(&memory, &memory, &expected);
}

#[test]
fn profiles_of_planned_and_dynamic_runs_are_readable() {
    let params = Params::seeded(0);
    let network = Model::Mlp.build(&params);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1);
    let program = network
        .training(&mut session, 8, Model::Mlp.optimizer())
        .expect("a program");
    let (images, labels) = Model::Mlp.batch(8, 1);

    let run = session
        .record(&program, (&images, &labels))
        .expect("a step");
    let (dag, plan) = (program.plan().dag(), program.plan().offsets());
    let (peak, bytes) = slabwise_planner::peak(dag, plan);
    let at_peak = program.memory_profile(&run, peak);
    let holders = slabwise_planner::holders_at_peak(dag, plan);
    read_by_others(
        &at_peak,
        &at_peak,
        &Expected {
            in_use: bytes,
            reserved: plan.height,
            blocks: holders.len(),
            profile: bytes,
        },
    );
    let whole = program.memory_profile(&run, run.steps.len());
    read_by_others(
        &whole,
        &at_peak,
        &Expected {
            in_use: 0,
            reserved: plan.height,
            blocks: 0,
            profile: bytes,
        },
    );
    // Replayed as an allocation trace, it needs the planned bytes.
    let trace =
        Trace::of_snapshot_json(&snapshot_json(whole.clone()).expect("JSON")).expect("a trace");
    assert_eq!(trace.peak_live_bytes(), plan.lower_bound);
    let kernels = trace_events_json(whole).matches("\"ph\":\"X\"").count();
    assert_eq!(kernels, program.plan().kernels());

    session.pool().record(usize::MAX);
    drop(
        session
            .run_dynamic(&program, (&images, &labels))
            .expect("a step"),
    );
    let s = session.pool_statistics();
    let memory = MemoryProfile::from(session.pool());
    let blocks = session.pool().live_buffers().len();
    read_by_others(
        &memory,
        &memory,
        &Expected {
            in_use: s.bytes_in_use,
            reserved: s.pool_bytes,
            blocks,
            profile: s.bytes_in_use,
        },
    );
}
