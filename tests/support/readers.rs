//! The readers of foreign files, each as a function of bytes: a file is read as a sound value, or
//! refused. Fuzz targets and tests call the same functions.

use std::path::Path;
use std::sync::Mutex;

use slabwise::data::{Cifar10, Idx};
use slabwise::memory::replay::{Op, Trace as Replayed};
use slabwise::nn::Linear;
use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise::weights::{File, Rules, Weights};
use slabwise_cli::plan_diff::{Diff, PlanFile};
use slabwise_cuda::cache::entry;
use slabwise_cuda::nvrtc::Cubin;
use slabwise_onnx::OnnxModel;
use slabwise_planner::csv;
use slabwise_planner::remat_graph::RematGraph;

/// A reader of a file format, with the limits of its memory.
pub struct Reader {
    /// Its name, which is also that of its folder of seeds and its fuzz target.
    pub name: &'static str,
    /// Reads; panics if an accepted file is unsound.
    pub read: fn(&[u8]) -> Result<(), String>,
    /// The most bytes of memory per byte of the file.
    #[allow(dead_code, reason = "fuzz targets leave memory to the fuzzer's limits")]
    pub bytes_per_byte: u64,
    /// The most bytes of memory for any file, in addition.
    #[allow(dead_code, reason = "as above")]
    pub fixed_bytes: u64,
}

const MIB: u64 = 1 << 20;

/// All of them. The size in the header of an IDX file is reserved up to 64 MiB before any data is
/// read; gzip packs a thousand to one. A node of an ONNX model may be a constant of a million
/// elements.
pub const READERS: &[Reader] = &[
    Reader {
        name: "trace",
        read: trace,
        bytes_per_byte: 256,
        fixed_bytes: 4 * MIB,
    },
    Reader {
        name: "plan",
        read: plan,
        bytes_per_byte: 128,
        fixed_bytes: 4 * MIB,
    },
    Reader {
        name: "csv",
        read: csv,
        bytes_per_byte: 512,
        fixed_bytes: 4 * MIB,
    },
    Reader {
        name: "graph",
        read: graph,
        bytes_per_byte: 512,
        fixed_bytes: 4 * MIB,
    },
    Reader {
        name: "idx",
        read: idx,
        bytes_per_byte: 1100,
        fixed_bytes: 66 * MIB,
    },
    Reader {
        name: "cifar",
        read: cifar,
        bytes_per_byte: 8,
        fixed_bytes: 4 * MIB,
    },
    Reader {
        name: "weights",
        read: weights,
        bytes_per_byte: 256,
        fixed_bytes: 4 * MIB,
    },
    Reader {
        name: "checkpoint",
        read: checkpoint,
        bytes_per_byte: 256,
        fixed_bytes: 4 * MIB,
    },
    Reader {
        name: "cubin",
        read: cubin,
        bytes_per_byte: 32,
        fixed_bytes: MIB,
    },
    Reader {
        name: "onnx",
        read: onnx,
        bytes_per_byte: 4096,
        fixed_bytes: 256 * MIB,
    },
];

/// A log of RMM, a snapshot of PyTorch (pickle or JSON), or lifetimes.
fn trace(bytes: &[u8]) -> Result<(), String> {
    let trace = Replayed::of_bytes(bytes)?;
    assert!(
        trace.ops().len() <= bytes.len(),
        "no operation out of nothing"
    );
    let frees = trace
        .ops()
        .iter()
        .filter(|op| matches!(op, Op::Free(_)))
        .count();
    assert!(2 * frees <= trace.ops().len() && trace.peak_live_bytes() < 1 << 62);
    Ok(())
}

/// The output of `slabwise plan --json`.
fn plan(bytes: &[u8]) -> Result<(), String> {
    let plan = PlanFile::read(str::from_utf8(bytes).map_err(|e| e.to_string())?)?;
    assert!(plan.buffers.iter().all(|row| row.start <= row.end && row.offset.checked_add(row.occupied_bytes).is_some()));
    assert_eq!(
        plan.buffers
            .iter()
            .map(|row| row.at_peak_bytes())
            .sum::<u64>(),
        plan.peak.bytes
    );
    assert!(Diff::of(&plan, &plan).is_empty());
    Ok(())
}

/// A packing problem.
fn csv(bytes: &[u8]) -> Result<(), String> {
    let table =
        csv::read(str::from_utf8(bytes).map_err(|e| e.to_string())?).map_err(|e| e.to_string())?;
    assert_eq!(
        csv::read(&csv::write(&table)).as_ref(),
        Ok(&table),
        "the value survives writing"
    );
    Ok(())
}

/// A graph of the format `remat-graph-v1`.
fn graph(bytes: &[u8]) -> Result<(), String> {
    let graph = RematGraph::read(bytes).map_err(|e| e.to_string())?;
    let known = |ids: &[u32]| ids.iter().all(|&id| (id as usize) < graph.nodes.len());
    assert!(
        known(&graph.outputs)
            && graph
                .nodes
                .iter()
                .all(|n| known(&n.inputs) && known(&n.inplace) && known(&n.mutates))
    );
    graph
        .to_dag(true)
        .dag
        .verify()
        .map_err(|e| panic!("a graph that was accepted: {e}"))
}

/// Arrays of bytes in the format of MNIST: labels or images, by the number of dimensions.
fn idx(bytes: &[u8]) -> Result<(), String> {
    let [labels, images] = [1, 3].map(|rank| Idx::of_bytes(bytes, rank));
    assert!(
        labels.is_err() || images.is_err(),
        "a file has one number of dimensions"
    );
    let idx = labels.or(images).map_err(|e| e.to_string())?;
    assert_eq!(idx.dims.iter().product::<usize>(), idx.data.len());
    Ok(())
}

/// A file of CIFAR-10.
fn cifar(bytes: &[u8]) -> Result<(), String> {
    let split = Cifar10::of_bytes(bytes).map_err(|e| e.to_string())?;
    assert_eq!(split.len() * 3073, bytes.len());
    Ok(())
}

/// A safetensors or GGUF file.
fn weights(bytes: &[u8]) -> Result<(), String> {
    if bytes.starts_with(b"GGUF") {
        return gguf(bytes);
    }
    let file = File::of_bytes(Path::new("weights"), bytes.to_vec()).map_err(|e| e.to_string())?;
    let sizes: u64 = file.tensors().map(|t| t.bytes.len() as u64).sum();
    assert!(sizes <= bytes.len() as u64, "tensors do not overlap");
    for tensor in file.tensors() {
        assert_eq!(
            tensor.shape.iter().product::<u64>() * tensor.dtype.bytes() as u64,
            tensor.bytes.len() as u64
        );
    }
    Ok(())
}

/// A GGUF file, whose tensors are read as they are and, where they are small, decoded.
fn gguf(bytes: &[u8]) -> Result<(), String> {
    let path = std::env::temp_dir().join(format!("slabwise-{}.gguf", std::process::id()));
    std::fs::write(&path, bytes).map_err(|e| e.to_string())?;
    let weights = Weights::open(&path).map_err(|e| e.to_string());
    // Open files stay readable without their name.
    #[cfg(unix)]
    let _ = std::fs::remove_file(&path);
    let weights = weights?;
    assert!(
        weights.bytes() <= bytes.len() as u64,
        "tensors do not overlap"
    );
    let params = Params::seeded(0);
    let mut rules = Rules::new().cast("{*all}").ignore_extra("{*all}");
    for (number, (name, _, shape)) in weights.names().enumerate() {
        let read = weights.read(name).map_err(|e| e.to_string())?;
        assert!(read.is_some_and(|read| read.len() <= bytes.len()));
        if number < 4 && shape.iter().product::<u64>() <= 1 << 12 && is_plain(name) {
            let shape: Vec<usize> = shape.iter().map(|&n| n as usize).collect();
            let own = format!("own{number}");
            params.root().param(&own, &*shape, Init::Constant(0.0));
            rules = rules.rename(name, &own);
        }
    }
    let session = Session::new(Device::Cpu, params).map_err(|e| e.to_string())?;
    let loaded = session.with_threads(1).load_from(&weights, &rules);
    loaded.map(drop).map_err(|e| e.to_string())
}

/// Whether a pattern of this text stands for the name alone.
fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Weights and optimizer state of a small model: all of it is loaded, or nothing changes.
fn checkpoint(bytes: &[u8]) -> Result<(), String> {
    static SESSION: Mutex<Option<Session>> = Mutex::new(None);
    let mut session = SESSION
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let session = session.get_or_insert_with(small_session);
    let names: Vec<String> = session.names().map(String::from).collect();
    let bits = |session: &Session| -> Vec<Vec<u32>> {
        names
            .iter()
            .map(|name| match session.value_as::<f32>(name) {
                Ok(numbers) => numbers.iter().map(|x| x.to_bits()).collect(),
                Err(_) => {
                    let steps = session.value_as::<i32>(name).expect("an integer");
                    steps.iter().map(|&n| n as u32).collect()
                }
            })
            .collect()
    };
    let before = bits(session);
    let file =
        File::of_bytes(Path::new("checkpoint"), bytes.to_vec()).map_err(|e| e.to_string())?;
    match session.load_file(&file) {
        Ok(()) => Ok(()),
        Err(error) => {
            assert_eq!(
                bits(session),
                before,
                "refused, and yet something has changed"
            );
            Err(error.to_string())
        }
    }
}

/// An entry of the cache of compiled kernels, unchanged and with a new checksum, because nothing
/// behind a wrong checksum is read.
fn cubin(bytes: &[u8]) -> Result<(), String> {
    let key = "5eed".repeat(16);
    let sound = |cubin: Cubin| {
        assert!(
            cubin.usage.iter().map(|u| u.name.len()).sum::<usize>() + cubin.image.len()
                <= bytes.len(),
            "no code out of nothing"
        );
        assert_eq!(
            entry::decode(&entry::encode(&cubin, &key), &key).expect("it was accepted"),
            cubin
        );
    };
    if let Some(rest) = bytes.get(entry::HEAD_BYTES..) {
        let _ = entry::decode(&entry::seal(rest, &key), &key).map(sound);
    }
    entry::decode(bytes, &key)
        .map(sound)
        .map_err(|e| e.to_string())
}

/// An ONNX model, which becomes part of a trace and is planned, open dimensions as 3.
fn onnx(bytes: &[u8]) -> Result<(), String> {
    let model = OnnxModel::of_bytes(bytes).map_err(|e| e.to_string())?;
    let open: Vec<String> = model.open_dims().into_iter().map(String::from).collect();
    let sized = |of: &dyn Fn(&str) -> Dim| -> Result<(), String> {
        let mut model = OnnxModel::of_bytes(bytes).map_err(|e| e.to_string())?;
        for dim in &open {
            model = model.with_dim(dim, of(dim));
        }
        planned(&model)
    };
    // Lengths that a run decides are refused in places where a number is not.
    if !open.is_empty() {
        let _ = sized(&|name| Dim::bounded(Dim::name(name), 3));
    }
    sized(&|_| Dim::from(3))
}

/// Plans a model whose lengths are known.
fn planned(model: &OnnxModel) -> Result<(), String> {
    let (params, trace) = (Params::seeded(0), Trace::inference());
    let inputs = model.declare(&trace).map_err(|e| e.to_string())?;
    let outputs = model.trace(&trace, &params.root(), &inputs);
    let outputs = outputs.map_err(|e| e.to_string())?;
    assert_eq!(outputs.len(), model.outputs().len());
    let session = Session::new(Device::Cpu, params).expect("a session");
    let plan = session
        .plan_any(&trace, &outputs)
        .map_err(|e| e.to_string())?;
    assert!(plan.lower_bound_bytes() <= plan.slab_bytes());
    Ok(())
}

/// A layer of three inputs and two outputs, trained by Adam.
pub fn small_session() -> Session {
    let params = Params::seeded(0);
    let layer = Linear::new(&params.root() / "layer", 3, 2);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1);
    let trace = Trace::training();
    let x = trace.input("x", F32, (4, 3));
    let loss = x.apply(&layer).square().mean();
    trace.minimize(loss, Adam::new(1e-3));
    session.compile(&trace, [loss]).expect("a program");
    session
}

/// Reads bytes with the reader of this name.
#[allow(dead_code, reason = "fuzz targets call readers by name")]
pub fn read(name: &str, bytes: &[u8]) -> Result<(), String> {
    let reader = READERS
        .iter()
        .find(|r| r.name == name)
        .expect("a reader of this name");
    (reader.read)(bytes)
}
