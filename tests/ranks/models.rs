//! The built-in models on several ranks: the same bits whatever the world and the strategy, and the
//! bytes that a step sends.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use ndarray::{ArrayD, Axis, Slice};
use safetensors::SafeTensors;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Strategy, World};
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

/// Options with which kernels run beside exchanges, or do not.
fn overlapping(overlap: bool) -> CompileOptions {
    let mut options = CompileOptions::default();
    options.planner.overlap = overlap;
    options
}

/// Trains for some steps on a batch in as many parts as this rank has grains.
fn in_grains(
    world: &World,
    model: Model,
    (batch, steps): (usize, u64),
    overlap: bool,
) -> Result<Hashes> {
    let (session, network) = session(world, model)?;
    let mut session = session.with_options(overlapping(overlap));
    let trace = Trace::training();
    let parts = world.grains_per_rank();
    let rows = if batch.is_multiple_of(GRAINS) {
        world.share(batch).len().into()
    } else {
        Dim::bounded("batch", (parts * batch.div_ceil(GRAINS)) as u32)
    };
    let (x, labels) = network.inputs(&trace, rows);
    let (x, labels) = (x.shares(parts), labels.shares(parts));
    let optimizer = model.optimizer().optimizer();
    let loss = trace.minimize_in_parts(parts, optimizer, |i| {
        x[i].apply(&network).cross_entropy(labels[i])
    });
    let step = session.compile(&trace, [loss])?;
    let beside = step.plan().communication().map_or(0, |c| c.overlapped);
    // On 4 ranks a small model may have no room for them within the bytes of its plan.
    match world.ranks() {
        2 => assert_eq!(beside > 0, overlap, "{model}"),
        ranks => assert!(beside == 0 || (overlap && ranks > 1), "{model}"),
    }
    for seed in 0..steps {
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
            // Kernels run beside exchanges, and with two ranks do not, too.
            for overlap in [true, false].into_iter().take(1 + usize::from(ranks == 2)) {
                let worlds = World::local(ranks).expect("a world");
                let ran = on_each(worlds, |world| {
                    let world = world.with_grains(GRAINS).expect("they share them");
                    let world = world.with_strategy(strategy);
                    in_grains(&world, model, (8, STEPS), overlap).expect("it trains")
                });
                let what = format!("{model} on {ranks} ranks, {strategy:?}, {overlap}");
                compare(ran, &mut expected, &what);
            }
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

#[test]
fn batches_that_grains_divide_unevenly_have_the_same_bits_in_every_world() {
    for model in MODELS {
        let model = Model::parse(model).expect("a model");
        let mut expected = None;
        for (ranks, strategy) in [
            (1, Strategy::Replicated),
            (2, Strategy::Replicated),
            (2, Strategy::ShardedState),
            (4, Strategy::ShardedState),
        ] {
            let worlds = World::local(ranks).expect("a world");
            let ran = on_each(worlds, |world| {
                let world = world.with_grains(GRAINS).expect("they share them");
                let world = world.with_strategy(strategy);
                // Grains of 3, 3, 2 and 2 rows.
                in_grains(&world, model, (10, 6), true).expect("it trains")
            });
            let told = format!("{model} on {ranks} ranks, {strategy:?}");
            compare(ran, &mut expected, &told);
        }
    }
}

#[test]
fn a_budget_holds_on_each_rank_and_keeps_the_bits() {
    let model = "gpt:layers=3,width=64,heads=4,length=64,vocabulary=96";
    let model = Model::parse(model).expect("a model");
    for strategy in [Strategy::Replicated, Strategy::ShardedState] {
        let ran = |budget: Budget| {
            let worlds = World::local(2).expect("a world");
            on_each(worlds, |world| {
                let world = world.with_strategy(strategy);
                let (session, network) = session(&world, model)?;
                let mut session = session.with_budget(budget);
                let step = network.training(&mut session, 4, model.optimizer())?;
                for seed in 0..3 {
                    let (examples, labels) = shared(&world, model, 8, seed);
                    session.run(&step, (&examples, &labels))?;
                    let measured = session.last_run().peak_slab_bytes;
                    assert_eq!(measured, step.plan().slab_bytes(), "{strategy:?}");
                }
                let bytes = step.plan().slab_bytes() + session.persistent_bytes();
                Ok::<_, slabwise::Error>((step.plan().slab_bytes(), bytes, hashes(&session)))
            })
        };
        let whole: Vec<_> = ran(Budget::Unlimited)
            .into_iter()
            .collect::<Result<_>>()
            .expect("it trains");
        let (slab, bytes, _) = whole[0];
        for budget in [
            Budget::Fraction(0.5),
            Budget::Bytes(Bytes(bytes - slab / 2)),
        ] {
            for (ran, whole) in ran(budget).into_iter().zip(&whole) {
                let (own, all, hashes) = ran.expect("it trains within the budget");
                assert!(own <= slab / 2, "{strategy:?}: {own} of {slab}");
                assert!(all <= bytes - slab / 2, "{strategy:?}: {all} of {bytes}");
                assert!(hashes == whole.2, "{strategy:?}, {budget:?}");
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
        let planned = step.plan().communication().map(|c| c.sent);
        assert_eq!((sent[0], Some(sent[0])), (sent[1], planned), "{model}");
        assert!(world.control_bytes() > 0, "the ranks agree and meet");
        Ok::<_, slabwise::Error>((sent[0], weights))
    });
    let sent: Vec<(u64, u64)> = sent.into_iter().map(|s| s.expect("it runs")).collect();
    assert!(sent.iter().all(|s| *s == sent[0]), "{model}: {sent:?}");
    sent[0]
}

#[test]
fn gradients_are_not_planned_as_received() {
    let model = Model::parse("mlp").expect("a model");
    // The largest weight, half of which each of two ranks adds up.
    let largest = 784 * 512 * 4;
    let worlds = World::local(2).expect("a world");
    let planned = on_each(worlds, |world| {
        let (mut session, network) = session(&world, model)?;
        let step = network.training(&mut session, 32, model.optimizer())?;
        let most = step.plan().communication().map_or(0, |c| c.most);
        Ok::<_, slabwise::Error>((step.plan().slab_bytes(), most))
    });
    for planned in planned {
        let (slab, most) = planned.expect("it compiles");
        let sent_and_added = largest + largest / 2;
        assert!((sent_and_added..=slab).contains(&most), "{most}");
        assert!(slab < sent_and_added + 16_384, "{slab}");
    }
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
