//! No kernel of a built-in model has too few registers on a CUDA device, for any operands.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use slabwise_cuda::cache::Cache;
use slabwise_cuda::compiler::Compiler;
use slabwise_cuda::nvrtc::{self, Program};
use slabwise_cuda::{Description, Function, PRELUDE, Target};

use slabwise::{ChannelsLast, CompileOptions, EpilogueSums, Params, Precision, Trace};
use slabwise_compiler::backend;
use slabwise_compiler::compile::lowered;
use slabwise_models::Model;

/// Compute capabilities.
const DEVICES: [u32; 6] = [80, 86, 89, 90, 100, 120];

/// A model's training step in one of the precisions.
type Case = (Model, Precision);

/// All cases, each with its pair of [`DEVICES`]: an older and a newer one. The three cases of a
/// model have all six.
fn cases() -> impl Iterator<Item = (Case, [u32; 2])> {
    let (older, newer) = DEVICES.split_at(DEVICES.len() / 2);
    Model::ALL.iter().enumerate().flat_map(move |(m, &model)| {
        Precision::ALL
            .into_iter()
            .enumerate()
            .map(move |(p, precision)| {
                let pair = [
                    older[(m + p) % older.len()],
                    newer[(m + 2 * p) % newer.len()],
                ];
                ((model, precision), pair)
            })
    })
}

/// The functions of the cases that have a device, by name; made once for each of [`DEVICES`].
fn functions(sm: u32) -> &'static BTreeMap<String, Function> {
    static MADE: [OnceLock<BTreeMap<String, Function>>; DEVICES.len()] =
        [const { OnceLock::new() }; DEVICES.len()];
    let at = DEVICES.iter().position(|&device| device == sm);
    MADE[at.expect("a device of the list")].get_or_init(|| {
        let own = cases().filter(|(_, pair)| pair.contains(&sm));
        made(&own.map(|(case, _)| case).collect::<Vec<_>>(), sm)
    })
}

/// The functions of cases for a device, by name.
fn made(cases: &[Case], sm: u32) -> BTreeMap<String, Function> {
    let next = AtomicUsize::new(0);
    let some = || {
        let mut all = BTreeMap::new();
        while let Some(&case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            all.extend(of_case(case, sm));
        }
        all
    };
    thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, |n| n.get());
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        let made = threads
            .into_iter()
            .flat_map(|t| t.join().expect("functions"));
        made.collect()
    })
}

/// The functions of a case, with images in both layouts and sums in both places, with and without
/// TF32.
fn of_case((model, precision): Case, sm: u32) -> BTreeMap<String, Function> {
    let device = Description::nearest(sm).target();
    let network = model.build(&Params::seeded(0));
    let trace = Trace::training().with_precision(precision);
    let loss = network.step(&trace, 64usize.into(), model.optimizer());
    let graph = trace.finish(&[loss]).expect("a model");
    let bounds = graph.symbols.bounds();
    let target = backend::Target::described(device);
    let mut specs = Vec::new();
    for (channels_last, epilogue_sums) in [
        (ChannelsLast::Off, EpilogueSums::Off),
        (ChannelsLast::default(), EpilogueSums::default()),
        (ChannelsLast::All, EpilogueSums::All),
    ] {
        let options = CompileOptions {
            channels_last,
            epilogue_sums,
            ..CompileOptions::default()
        };
        let program = lowered("step", &graph, &options, &target).expect("kernels");
        for task in program.kernels {
            if specs.iter().all(|(_, known)| *known != task.spec) {
                specs.push((task.name, task.spec));
            }
        }
    }
    let mut all = BTreeMap::new();
    for (name, spec) in &specs {
        for tf32 in [false, true] {
            let target = Target { tf32, ..device };
            let lowered = slabwise_cuda::lower(spec, &bounds, &target)
                .unwrap_or_else(|e| panic!("{model}, {name}: {e}"));
            let functions = lowered.functions.into_iter();
            all.extend(functions.map(|function| (function.name.clone(), function)));
        }
    }
    all
}

fn kind(function: &Function) -> &str {
    function.name.rsplit_once('_').map_or("", |(kind, _)| kind)
}

/// The parts of a function that determine the registers of a product: kernel and operands as types,
/// but for the numbers of words. The work on the sums is left out. Both types of halves need the same
/// registers.
fn multiplied(function: &Function) -> String {
    let lines = function.source.lines().filter(|line| {
        ["idx;", "Matrix<", "tile.product<"]
            .iter()
            .any(|part| line.contains(part))
    });
    let types = lines
        .flat_map(|line| line.split([',', '<', '>', ' ']))
        .filter(|word| word.parse::<u32>().is_ok_and(|n| n < 8) || word.parse::<u32>().is_err());
    let key = kind(function).to_string() + &types.collect::<Vec<_>>().join(" ");
    key.replace("bf16", "f16")
}

/// The functions that spill registers.
fn spilling(functions: &[&Function], sm: u32) -> Vec<String> {
    let executable = std::env::current_exe().expect("a path");
    let built = executable
        .parent()
        .and_then(|deps| deps.parent())
        .expect("a build folder");
    let cache = Cache::at(built.join("slabwise-cubins")).expect("a private folder");
    let programs = Program::each(PRELUDE, functions.iter().copied(), sm);
    let made = Compiler::of_process()
        .compile(Some(&cache), &programs)
        .unwrap_or_else(|e| panic!("{e}"));
    let usage: Vec<_> = made.iter().flat_map(|code| &code.usage).collect();
    assert_eq!(usage.len(), functions.len(), "sm_{sm}: {usage:?}");
    let spilled = usage.iter().filter(|usage| usage.spill_bytes > 0);
    spilled.map(|usage| format!("sm_{sm}: {usage:?}")).collect()
}

/// Fails if one of the functions spills registers.
fn check(functions: &[&Function], sm: u32) {
    let spilled = spilling(functions, sm);
    assert!(spilled.is_empty(), "{}", spilled.join("\n"));
}

/// Fails if one of the functions spills registers on its device.
fn check_each<'f>(functions: impl Iterator<Item = (u32, &'f Function)>) {
    let mut of_device: BTreeMap<u32, Vec<&Function>> = BTreeMap::new();
    for (device, function) in functions {
        of_device.entry(device).or_default().push(function);
    }
    for (device, functions) in of_device {
        check(&functions, device);
    }
}

/// Whether there is a compiler; says so if not.
fn compiler() -> bool {
    let found = nvrtc::version();
    if let Err(e) = &found {
        assert!(std::env::var_os("CI").is_none(), "{e}");
        eprintln!("skipped: {e}");
    }
    found.is_ok()
}

/// Of the products that differ in the work on their sums alone, the one with the most such work is
/// chosen, for one of the devices that have it. One in six of those is tested.
#[test]
fn products_of_models_spill_nothing() {
    if !compiler() {
        return;
    }
    let is_product = |f: &&Function| {
        let kinds = ["gemm_", "gemv_", "depthwise_"];
        kinds.iter().any(|kind| f.name.starts_with(kind))
    };
    let mut alike: BTreeMap<String, Vec<(u32, &Function)>> = BTreeMap::new();
    for device in DEVICES {
        for function in functions(device).values().filter(is_product) {
            let known = alike.entry(multiplied(function)).or_default();
            known.push((device, function));
        }
    }
    assert!(alike.len() > 150, "{} products", alike.len());
    let chosen = alike.into_values().enumerate().map(|(at, mut products)| {
        let longest = products.iter().map(|(_, f)| f.source.len()).max();
        products.retain(|(_, f)| Some(f.source.len()) == longest);
        products[at % products.len()]
    });
    check_each(chosen.step_by(6));
}

/// Of the split products by each kernel, the one with the most work on its sums is tested, for an
/// older and a newer device: it adds the sums of other blocks, and may then update several weights
/// with their states, which are loaded to registers.
#[test]
fn split_products_with_long_epilogues_spill_nothing() {
    if !compiler() {
        return;
    }
    let mut most_loads = 0;
    for devices in DEVICES.chunks(DEVICES.len() / 2) {
        let mut longest: BTreeMap<&str, (u32, &Function)> = BTreeMap::new();
        for &device in devices {
            let all = functions(device).values();
            for function in all.filter(|f| f.source.contains("const Parts<")) {
                let known = longest.entry(kind(function)).or_insert((device, function));
                if function.source.len() > known.1.source.len() {
                    *known = (device, function);
                }
            }
        }
        let loaded = longest.values().map(|(_, f)| loads(f));
        most_loads = loaded.fold(most_loads, usize::max);
        check_each(longest.into_values());
    }
    assert!(most_loads > 16, "{most_loads}");
}

/// The number of operands that a product's epilogue loads.
fn loads(function: &Function) -> usize {
    let (_, count) = function.source.split_once("COUNT = ").unwrap_or_default();
    let digits = count.split(' ').next().unwrap_or_default();
    digits.parse().unwrap_or_default()
}

/// Loops over rows whose threads keep values of the row from one pass to the next: one in six,
/// each for one of the devices that have it.
#[test]
fn rows_that_are_kept_spill_nothing() {
    if !compiler() {
        return;
    }
    let keeps = |f: &&Function| {
        let declared = |line: &str| {
            let name = line.trim().trim_end_matches("];").split(' ').nth(1)?;
            name.strip_prefix('k')?
                .split_once('[')?
                .1
                .parse::<u32>()
                .ok()
        };
        let kept = f.source.lines().filter_map(declared);
        f.name.starts_with("rows_") && kept.sum::<u32>() >= 8
    };
    let mut alike: BTreeMap<&str, Vec<(u32, &Function)>> = BTreeMap::new();
    for device in DEVICES {
        let own: Vec<&Function> = functions(device).values().filter(keeps).collect();
        assert!(own.len() > 10, "{} loops", own.len());
        for function in own {
            let known = alike.entry(&function.name).or_default();
            known.push((device, function));
        }
    }
    let one = |(at, of_devices): (usize, Vec<_>)| of_devices[at % of_devices.len()];
    check_each(alike.into_values().enumerate().map(one).step_by(6));
}

/// All functions of all cases for all devices.
#[test]
#[ignore = "compiles for an hour"]
fn kernels_of_models_spill_nothing() {
    let cases: Vec<Case> = cases().map(|(case, _)| case).collect();
    let of_device = |sm| {
        let all = made(&cases, sm);
        spilling(&all.values().collect::<Vec<_>>(), sm)
    };
    let spilled: Vec<String> = DEVICES.into_iter().flat_map(of_device).collect();
    assert!(spilled.is_empty(), "{}", spilled.join("\n"));
}
