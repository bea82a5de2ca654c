//! The built-in models on several ranks: the same bits whatever the world and the strategy, and the
//! bytes that a step sends.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use ndarray::{ArrayD, Axis, Slice};
use safetensors::SafeTensors;
use slabwise::prelude::*;
use slabwise::{Shape, Strategy, World};
use slabwise_models::{Examples, Model, Network};

use super::{both, on_each};

/// Small settings of the models, each with weights of 64 KiB and more, which are sent by themselves
/// and whose state is sharded, and smaller ones, which share buckets.
const MODELS: [&str; 4] = [
    "mlp:inputs=144,hidden1=128,hidden2=24",
    "cnn:size=12,width=4,hidden=256",
    "resnet20:size=8,width=12,blocks1=1,blocks2=1,blocks3=1",
    "gpt:layers=1,width=64,heads=2,length=8,vocabulary=96",
];

const GRAINS: usize = 4;
const STEPS: u64 = 20;

/// The rows of a range of an array.
fn rows<T: Clone>(array: &ArrayD<T>, own: &std::ops::Range<usize>) -> ArrayD<T> {
    let slice = Slice::from(own.start..own.end);
    array.slice_axis(Axis(0), slice).to_owned()
}

/// A rank's rows of a batch.
fn shared(world: &World, model: Model, batch: usize, seed: u64) -> (Examples, ArrayD<i32>) {
    let own = world.share(batch);
    let (examples, labels) = model.batch(batch, seed);
    let examples = match examples {
        Examples::Images(images) => Examples::Images(rows(&images, &own)),
        Examples::Tokens(tokens) => Examples::Tokens(rows(&tokens, &own)),
    };
    (examples, rows(&labels, &own))
}

/// A hash of each weight and each state of an optimizer, from the file that rank 0 writes of all
/// ranks' parts; and on every rank, of its own weights. The running statistics of batch norms are
/// left out, because they are those of a rank's own rows.
fn hashes(session: &Session) -> Hashes {
    let hash = |bytes: &[u8]| {
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        hasher.finish()
    };
    let learns = |name: &str| !name.contains("running");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("all.safetensors");
    session.save(&path).expect("it is saved");
    let file = std::fs::read(&path).unwrap_or_default();
    let all = match SafeTensors::deserialize(&file) {
        Ok(file) => file
            .iter()
            .filter(|(name, _)| learns(name))
            .map(|(name, tensor)| (name.to_string(), hash(tensor.data())))
            .collect(),
        Err(_) => BTreeMap::new(),
    };
    assert_eq!(all.is_empty(), session.world().rank() != 0, "rank 0 saves");
    let names: Vec<String> = session.names().map(str::to_string).collect();
    let weights = names
        .into_iter()
        .filter(|name| learns(name) && is_weight(name));
    let own = weights.map(|name| {
        let values = session.value(&name).expect("it is there");
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        (name, hash(&bytes))
    });
    [all, own.collect()]
}

/// Whether a name is a weight's, rather than of an optimizer's state.
fn is_weight(name: &str) -> bool {
    !["sgd.", "adam.", "adamw."]
        .iter()
        .any(|of| name.starts_with(of))
}

/// Compares the hashes of every rank with those of the first world.
fn compare(ran: Vec<Hashes>, expected: &mut Option<Hashes>, what: &str) {
    for (rank, [all, weights]) in ran.into_iter().enumerate() {
        let [first, own] = expected.get_or_insert_with(|| [all.clone(), weights.clone()]);
        // At least one number of state for each weight.
        assert!(weights.len() >= 6 && first.len() >= 2 * weights.len());
        assert_eq!(own, &weights, "weights of rank {rank}, {what}");
        assert!(rank > 0 || all == *first, "the file of rank 0, {what}");
    }
}

type Hashes = [BTreeMap<String, u64>; 2];

/// A session of a world with a model.
fn session(world: &World, model: Model) -> Result<(Session, Network)> {
    let params = Params::seeded(5);
    let network = model.build(&params);
    let session = Session::new(Device::Cpu, params)?.with_threads(1);
    Ok((session.on(world.clone())?, network))
}

/// Trains on a batch in as many parts as this rank has grains.
fn in_grains(world: &World, model: Model, batch: usize) -> Result<Hashes> {
    let (mut session, network) = session(world, model)?;
    let trace = Trace::training();
    let own = world.share(batch).len();
    let shape = |of: &[usize]| Shape::from([&[own], &of[1..]].concat().as_slice());
    let (examples, labels) = model.batch(1, 0);
    let x = match &examples {
        Examples::Images(x) => trace.input("x", F32, shape(x.shape())),
        Examples::Tokens(x) => trace.input("x", I32, shape(x.shape())),
    };
    let labels = trace.input("labels", I32, shape(labels.shape()));
    let parts = world.grains_per_rank();
    let (x, labels) = (x.split(0, parts), labels.split(0, parts));
    let optimizer = model.optimizer().optimizer();
    let loss = trace.minimize_in_parts(parts, optimizer, |i| {
        x[i].apply(&network).cross_entropy(labels[i])
    });
    let step = session.compile(&trace, [loss])?;
    for seed in 0..STEPS {
        let (examples, labels) = shared(world, model, batch, seed);
        let loss = session.run(&step, (&examples, &labels))?[0].item();
        assert!(loss.is_finite(), "{model}: {loss}");
        let peak = session.last_run().peak_slab_bytes;
        assert_eq!(peak, step.plan().slab_bytes(), "{model}");
    }
    Ok(hashes(&session))
}

#[test]
fn built_in_models_have_the_same_bits_in_every_world() {
    for model in MODELS {
        let model = Model::parse(model).expect("a model");
        let mut expected = None;
        for (ranks, strategy) in both(&[1, 2, 4]) {
            if (ranks, strategy) == (1, Strategy::ShardedState) {
                continue;
            }
            let worlds = World::local(ranks).expect("a world");
            let ran = on_each(worlds, |world| {
                let world = world.with_grains(GRAINS).expect("they share them");
                let world = world.with_strategy(strategy);
                in_grains(&world, model, 8).expect("it trains")
            });
            let what = format!("{model} on {ranks} ranks, {strategy:?}");
            compare(ran, &mut expected, &what);
        }
    }
}

/// Trains on batches whose rows the ranks share unevenly.
fn uneven(world: &World, model: Model) -> Result<Hashes> {
    let (mut session, network) = session(world, model)?;
    let batch = Dim::bounded("batch", 8);
    let step = network.training(&mut session, batch, model.optimizer())?;
    for (seed, rows) in (0..).zip([7, 5, 8]) {
        let (examples, labels) = shared(world, model, rows, seed);
        session.run(&step, (&examples, &labels))?;
    }
    Ok(hashes(&session))
}

#[test]
fn uneven_shares_of_built_in_models_have_the_same_bits_with_sharded_state() {
    for model in MODELS {
        let model = Model::parse(model).expect("a model");
        for ranks in [2, 4] {
            let mut expected = None;
            for strategy in [Strategy::Replicated, Strategy::ShardedState] {
                let worlds = World::local(ranks).expect("a world");
                let ran = on_each(worlds, |world| {
                    uneven(&world.with_strategy(strategy), model).expect("it trains")
                });
                let what = format!("{model} on {ranks} ranks, {strategy:?}");
                compare(ran, &mut expected, &what);
            }
        }
    }
}

/// The weights of a model.
fn weights(session: &Session) -> u64 {
    let names: Vec<String> = session.names().map(str::to_string).collect();
    let names = names.iter().filter(|name| !name.contains("running"));
    let of = |name: &String| session.value(name).expect("it is there").len() as u64;
    names.map(of).sum()
}

/// The bytes of values that each rank sends in a step of a model on one row each, and the weights
/// of the model.
fn sent_by(model: Model, ranks: usize, strategy: Strategy) -> (u64, u64) {
    let worlds = World::local(ranks).expect("a world");
    let sent = on_each(worlds, |world| {
        let world = world.with_strategy(strategy);
        let (mut session, network) = session(&world, model)?;
        let weights = network
            .inference(&mut session, 1)
            .map(|_| weights(&session))?;
        let step = network.training(&mut session, 1, model.optimizer())?;
        let (examples, labels) = shared(&world, model, ranks, 0);
        let mut sent = Vec::new();
        for _ in 0..2 {
            let before = world.sent_bytes();
            session.run(&step, (&examples, &labels))?;
            sent.push(world.sent_bytes() - before);
        }
        assert_eq!(sent[0], sent[1], "{model}");
        assert!(world.control_bytes() > 0, "the ranks agree and meet");
        Ok::<_, slabwise::Error>((sent[0], weights))
    });
    let sent: Vec<(u64, u64)> = sent.into_iter().map(|s| s.expect("it runs")).collect();
    assert!(sent.iter().all(|s| *s == sent[0]), "{model}: {sent:?}");
    sent[0]
}

#[test]
fn a_step_sends_the_bytes_of_the_formula() {
    let all = MODELS.map(|model| Model::parse(model).expect("a model"));
    for model in all {
        for (ranks, strategy) in both(&[2, 4]) {
            let (sent, weights) = sent_by(model, ranks, strategy);
            let n = ranks as u64;
            let formula = 2 * (n - 1) * weights * 4 / n;
            let padding = sent - formula;
            println!("{model} on {ranks} ranks, {strategy:?}: {sent} bytes, {padding} of padding");
            // A bucket is padded to a multiple of the ranks.
            assert!(padding < 2 * (n - 1) * 4 * 2, "{model}: {padding}");
        }
    }
    let gpt = Model::parse("gpt").expect("a model");
    let (sent, weights) = sent_by(gpt, 2, Strategy::Replicated);
    assert_eq!((weights, sent), (3_716_608, 14_866_432));
}
