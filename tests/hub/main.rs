//! Weights as the Hugging Face hub has them: models recorded by `tests/data/record_hub.py` load in
//! one line each and give PyTorch's results, and are saved in the same layouts. `rules.rs` has the
//! rules one by one, `decoders.rs` whole folders, `gguf.rs` llama.cpp's format, `hostile.rs` damaged
//! files, `memory.rs` the memory that loading takes.

mod decoders;
mod gguf;
mod hostile;
mod memory;
mod models;
mod rules;

use std::path::{Path, PathBuf};

use slabwise::prelude::*;
use slabwise::weights::{File, Rules, Weights};

/// The folder of a recorded model.
fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/hub")
        .join(name)
}

/// A session with these parameters.
fn session(params: &Params) -> Session {
    let session = Session::new(Device::Cpu, params.clone()).expect("a session");
    session.with_threads(1)
}

/// Parameters of given names and shapes, as a model declares them.
fn declare(shapes: &[(String, Vec<usize>)]) -> Params {
    let params = Params::seeded(1);
    for (name, shape) in shapes {
        let mut at = params.root();
        let mut path: Vec<&str> = name.split('.').collect();
        let last = path.pop().expect("a name");
        for part in path {
            at = at / part;
        }
        at.param(last, &**shape, Init::Constant(0.5));
    }
    params
}

/// The f32 elements of a file's tensor.
fn floats(file: &File, name: &str) -> Vec<f32> {
    let entry = file.get(name).unwrap_or_else(|| panic!("no {name}"));
    assert_eq!(entry.dtype, F32, "{name}");
    let floats = entry.bytes.chunks_exact(4);
    floats
        .map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")))
        .collect()
}

/// The values of a weight of a session.
fn value(session: &Session, name: &str) -> Vec<f32> {
    let value = session.value(name).unwrap_or_else(|e| panic!("{e}"));
    value.into_raw_vec_and_offset().0
}

/// Opens and loads, with the error's text.
fn load(session: &mut Session, path: &Path, rules: &Rules) -> Result<usize, String> {
    let weights = Weights::open(path).map_err(|e| e.to_string())?;
    let loaded = session.load_from(&weights, rules);
    loaded.map(|l| l.count).map_err(|e| e.to_string())
}
