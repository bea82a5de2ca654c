//! Weights and optimizer states that are stored in halves, against the same in f32 whose values a
//! loop outside of the program rounds.

use half::{bf16, f16};
use ndarray::{Array2, ArrayD};
use slabwise::nn::{
    BatchNorm2d, Conv2d, Embedding, Flatten, LayerNorm, Linear, MaxPool2d, Relu, Sequential,
};
use slabwise::optim::{Adafactor, Adam, AdamW, Lion, RmsProp, Sgd};
use slabwise::params::{Params, Scope};
use slabwise::prelude::*;
use slabwise::{Strategy, World};
use slabwise_models::Model;

const STEPS: u64 = 5;

fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        F16 => f16::from_f32(x).to_f32(),
        BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// A network with a table that is read by rows and as a matrix, and a convolutional one.
enum Net {
    Tokens(Embedding, Box<LayerNorm>, Box<Linear>),
    Images(Sequential),
}

impl Net {
    fn tokens(at: &Scope) -> Net {
        Net::Tokens(
            Embedding::new(at / "table", 40, 16),
            Box::new(LayerNorm::new(at / "norm", 16)),
            Box::new(Linear::new(at / "dense", 16, 16)),
        )
    }

    fn images(at: &Scope) -> Net {
        Net::Images(
            Sequential::new()
                .then(Conv2d::new(at / "conv", 1, 8, 3).padding(1))
                .then(BatchNorm2d::new(at / "norm", 8))
                .then(Relu)
                .then(MaxPool2d(2))
                .then(Flatten(1))
                .then(Linear::new(at / "head", 128, 10)),
        )
    }

    fn loss<'t>(&self, trace: &'t Trace) -> Tensor<'t> {
        match self {
            Net::Tokens(table, norm, dense) => {
                let tokens = trace.input("x", I32, (12,));
                let x = tokens.apply(table);
                let x = x + x.apply(&**norm).apply(&**dense).gelu();
                let weight = trace.param(table.weight()).transpose(0, 1);
                x.matmul(weight)
                    .cross_entropy(trace.input("labels", I32, (12,)))
            }
            Net::Images(net) => {
                let images = trace.input("x", F32, (6, 1, 8, 8));
                let labels = trace.input("labels", I32, (6,));
                images.apply(net).cross_entropy(labels)
            }
        }
    }

    fn run(&self, session: &mut Session, step: &Program<1>, seed: u64) -> f32 {
        let mut draw = slabwise_models::noise(seed);
        let mut integers = |n: usize, below: f32| -> Vec<i32> {
            (0..n).map(|_| (draw() * below) as i32).collect()
        };
        let ran = match self {
            Net::Tokens(..) => {
                let (x, labels) = (integers(12, 40.0), integers(12, 40.0));
                session.run(step, (&ndarray::arr1(&x), &ndarray::arr1(&labels)))
            }
            Net::Images(_) => {
                let labels = ndarray::arr1(&integers(6, 10.0));
                let x = ArrayD::from_shape_simple_fn(vec![6, 1, 8, 8], || draw() * 2.0 - 1.0);
                session.run(step, (&x, &labels))
            }
        };
        let loss = ran.expect("a step")[0].item();
        assert_eq!(session.last_run().peak_slab_bytes, step.plan().slab_bytes());
        loss
    }
}

/// A session, the step of a network in it, and the network.
fn learner(
    params: Params,
    net: fn(&Scope) -> Net,
    optimizer: impl Optimizer,
    threads: usize,
) -> (Session, Program<1>, Net) {
    let net = net(&params.root());
    let trace = Trace::training();
    let loss = net.loss(&trace);
    trace.minimize(loss, optimizer);
    let session = Session::new(Device::Cpu, params).expect("a session");
    let mut session = session.with_threads(threads);
    let step = session.compile(&trace, [loss]).expect("it compiles");
    (session, step, net)
}

/// Everything a session holds, as bits.
fn bits(session: &Session) -> Vec<(String, Vec<u32>)> {
    let of = |name: &str| {
        let value = session.value(name).expect("it is there");
        (
            name.to_string(),
            value.iter().map(|x| x.to_bits()).collect(),
        )
    };
    session.names().map(of).collect()
}

/// Rounds the values whose names are chosen.
fn round(session: &mut Session, dtype: DType, chosen: impl Fn(&str) -> bool) {
    let names: Vec<String> = session.names().map(String::from).collect();
    for name in names.iter().filter(|name| chosen(name)) {
        let value = session.value(name).expect("it is there");
        let value = value.mapv(|x| rounded(dtype, x));
        session.set_value(name, &value).expect("its shape");
    }
}

/// Whether a name is a weight's, not a state's or a statistic's.
fn is_weight(name: &str) -> bool {
    let first = name.split('.').next().unwrap_or_default();
    ["table", "norm", "dense", "conv", "head"].contains(&first) && !name.contains("running")
}

/// Trains with weights or states in halves, and in f32 with rounding between the steps.
fn check(
    net: fn(&Scope) -> Net,
    dtype: DType,
    [halves, plain]: [Box<dyn Optimizer>; 2],
    stored: DType,
    chosen: fn(&str) -> bool,
) {
    for threads in [1, 2] {
        let (mut session, step, own) = learner(
            Params::seeded(4).stored_in(stored),
            net,
            Boxed(&*halves),
            threads,
        );
        let (mut twin, twin_step, _) = learner(Params::seeded(4), net, Boxed(&*plain), threads);
        round(&mut twin, dtype, chosen);
        for seed in 0..STEPS {
            let loss = own.run(&mut session, &step, seed);
            let expected = own.run(&mut twin, &twin_step, seed);
            round(&mut twin, dtype, chosen);
            assert_eq!(loss.to_bits(), expected.to_bits(), "{dtype}, step {seed}");
        }
        assert!(bits(&session) == bits(&twin), "{dtype}: other weights");
    }
}

/// A reference to an optimizer as one.
struct Boxed<'a>(&'a dyn Optimizer);

impl Optimizer for Boxed<'_> {
    fn check(&self) -> std::result::Result<(), String> {
        self.0.check()
    }

    fn update<'t>(&self, trace: &'t Trace, weights: &[slabwise::optim::Weight<'t>]) {
        self.0.update(trace, weights);
    }
}

#[test]
fn weights_in_halves_learn_as_rounded_ones() {
    for net in [Net::tokens as fn(&Scope) -> Net, Net::images] {
        for dtype in [BF16, F16] {
            let optimizers: [fn() -> Box<dyn Optimizer>; 6] = [
                || Box::new(Sgd::new(0.05).momentum(0.9)),
                || Box::new(Adam::new(1e-2)),
                || Box::new(AdamW::new(1e-2).clip_norm(0.5)),
                || Box::new(RmsProp::new(1e-2)),
                || Box::new(Lion::new(1e-2)),
                || Box::new(Adafactor::new(1e-1)),
            ];
            for optimizer in optimizers {
                check(net, dtype, [optimizer(), optimizer()], dtype, is_weight);
            }
        }
    }
}

#[test]
fn states_in_halves_are_rounded_after_each_step() {
    let is_state = |name: &str| name.starts_with("adam.") || name.starts_with("sgd.");
    for dtype in [BF16, F16] {
        let optimizers: [[Box<dyn Optimizer>; 2]; 2] = [
            [
                Box::new(Adam::new(1e-2).betas(0.9, 0.99).states_in(dtype)),
                Box::new(Adam::new(1e-2).betas(0.9, 0.99)),
            ],
            [
                Box::new(Sgd::new(0.05).momentum(0.9).states_in(dtype)),
                Box::new(Sgd::new(0.05).momentum(0.9)),
            ],
        ];
        for pair in optimizers {
            check(Net::tokens, dtype, pair, F32, is_state);
        }
    }
}

/// Steps too small for the type add up in masters: they are those of weights in f32, but for the
/// rounded weights that gradients are taken at.
#[test]
fn master_weights_keep_rounding_errors() {
    let descend = |stored: DType, optimizer: &dyn Optimizer| {
        let params = Params::seeded(4).stored_in(stored);
        let weight = params.root().param("w", (3,), Init::Constant(1.0));
        let trace = Trace::training();
        // The gradient is 1 everywhere.
        let loss = trace.param(&weight).sum();
        trace.minimize(loss, Boxed(optimizer));
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let step = session.compile(&trace, [loss]).expect("it compiles");
        for _ in 0..100 {
            session.run(&step, ()).expect("a step");
        }
        session
    };
    let rate = 1e-4;
    let at = |session: &Session, name: &str| session.value(name).expect("it is there")[[0]];
    let wide = at(&descend(F32, &Sgd::new(rate)), "w");
    assert!((wide - 0.99).abs() < 1e-5, "{wide}");
    for dtype in [BF16, F16] {
        let plain = descend(dtype, &Sgd::new(rate));
        assert_eq!(
            at(&plain, "w"),
            1.0,
            "{dtype}: the step is below its resolution"
        );
        let masters = descend(dtype, &Sgd::new(rate).master_weights());
        let [w, remainder] = ["w", "remainder.w"].map(|name| at(&masters, name));
        assert_eq!((w + remainder).to_bits(), wide.to_bits(), "{dtype}");
        assert_eq!(w, rounded(dtype, wide), "{dtype}");
        // Of 16 bits each: within a rounding of the remainder per step.
        let both = descend(BF16, &Sgd::new(rate).master_weights().states_in(BF16));
        let sum = at(&both, "w") + at(&both, "remainder.w");
        assert!((sum - wide).abs() < 100.0 * 2f32.powi(-17), "{sum}");
    }
}

#[test]
fn averages_of_weights_in_halves_are_in_single_precision() {
    let params = Params::seeded(4).stored_in(BF16);
    let (mut session, step, net) =
        learner(params.clone(), Net::tokens, Sgd::new(0.1).ema(0.999), 1);
    let before = session.value("dense.weight").expect("a weight");
    assert_eq!(
        session.value("ema.dense.weight").expect("an average"),
        before
    );
    net.run(&mut session, &step, 0);
    let after = session.value("dense.weight").expect("a weight");
    let average = session.value("ema.dense.weight").expect("an average");
    for ((average, before), after) in average.iter().zip(&before).zip(&after) {
        assert_eq!(*average, before * 0.999 + after * (1.0 - 0.999f32));
    }
    let trace = Trace::inference().averaged();
    let loss = net.loss(&trace);
    session.compile(&trace, [loss]).expect("it reads averages");
}

#[test]
fn files_keep_the_type_and_are_read_in_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let session = |dtype: DType, seed: u64| {
        let params = Params::seeded(seed).stored_in(dtype);
        learner(params, Net::tokens, Adam::new(1e-2).master_weights(), 1)
    };
    let (mut halves, step, net) = session(BF16, 1);
    net.run(&mut halves, &step, 0);
    halves.save(path("halves.safetensors")).expect("it saves");
    // A resumed session goes on with the same bits.
    let (mut resumed, again, _) = session(BF16, 2);
    resumed.load(path("halves.safetensors")).expect("it loads");
    assert!(bits(&resumed) == bits(&halves));
    let next = net.run(&mut halves, &step, 1).to_bits();
    assert_eq!(net.run(&mut resumed, &again, 1).to_bits(), next);
    // Read by models of other types: exact where f32 has all numbers, else rounded.
    halves.save(path("later.safetensors")).expect("it saves");
    let (mut wide, ..) = session(F32, 3);
    wide.load_weights(path("later.safetensors"))
        .expect("it widens");
    let weight = |session: &Session| session.value("dense.weight").expect("a weight");
    assert_eq!(weight(&wide), weight(&halves));
    wide.set_value("dense.weight", &Array2::from_elem((16, 16), 0.1))
        .expect("its shape");
    wide.save(path("wide.safetensors")).expect("it saves");
    let (mut narrow, ..) = session(F16, 4);
    narrow
        .load_weights(path("wide.safetensors"))
        .expect("it rounds");
    assert_eq!(weight(&narrow)[[0, 0]], f16::from_f32(0.1).to_f32());
}

/// Built-in models with weights in halves: half of their bytes, and no larger slab.
#[test]
fn models_with_weights_in_halves_need_half_of_their_bytes() {
    for text in [
        "mlp:inputs=64,hidden1=48,hidden2=32",
        "gpt:layers=2,width=32,heads=2,length=16,vocabulary=50",
        "llama:layers=2,width=32,heads=4,length=16,vocabulary=64",
        "resnet20:size=16,width=8,blocks1=1,blocks2=1,blocks3=1",
    ] {
        let model = Model::parse(text).expect("a model");
        let bytes = |dtype: DType| {
            let params = Params::seeded(2).stored_in(dtype);
            let network = model.build(&params);
            let mut session = Session::new(Device::Cpu, params.clone()).expect("a session");
            let step = network
                .training(&mut session, 4, model.optimizer())
                .expect("it compiles");
            let (examples, labels) = model.batch(4, 0);
            let loss = session.run(&step, (&examples, &labels)).expect("a step")[0].item();
            assert!(loss.is_finite());
            let declared = params.declared();
            let sizes = declared
                .iter()
                .map(|p| p.dims().iter().product::<usize>() * p.dtype().bytes());
            (sizes.sum::<usize>(), step.plan().slab_bytes(), loss)
        };
        let ((wide, slab, loss), (half, half_slab, near)) = (bytes(F32), bytes(BF16));
        // Running statistics stay in f32.
        assert!(half * 100 <= wide * 55, "{text}: {half} of {wide} bytes");
        assert!(
            half_slab <= slab + slab / 10,
            "{text}: {half_slab} and {slab} bytes"
        );
        assert!(
            (near - loss).abs() < 0.03 * loss,
            "{text}: {near} and {loss}"
        );
    }
}

#[test]
fn mistakes_name_the_parameter_and_its_type() {
    let params = Params::seeded(0);
    let at = &params.root() / "head";
    at.param("w", (2, 3), Init::Constant(0.0));
    at.stored_in(BF16).param("w", (2, 3), Init::Constant(0.0));
    at.stored_in(I32).param("n", (2,), Init::Constant(0.0));
    let said: Vec<String> = params.mistakes().iter().map(ToString::to_string).collect();
    assert!(
        said[0].contains(
            "\"head.w\" is declared as bf16 [2, 3], and as [2, 3] at tests/stored_halves.rs:"
        ),
        "{said:?}"
    );
    assert!(
        said[1].contains(
            "parameter \"head.n\" cannot be stored as i32: parameters are f32, f16 or bf16"
        ),
        "{said:?}"
    );
    let fault = Sgd::new(0.1).states_in(U8).check().expect_err("a mistake");
    assert_eq!(fault, "states_in: states are f32, f16 or bf16, not u8");
}

/// Ranks that update a part of each weight exchange the parts in the type that they are stored in,
/// and get the bits of ranks that update all.
#[test]
fn ranks_share_updates_of_halves() {
    let train = |strategy: Strategy| -> Vec<Vec<(String, Vec<u32>)>> {
        let worlds = World::local(2).expect("a world");
        std::thread::scope(|scope| {
            let rank = |world: World| {
                let params = Params::seeded(3).stored_in(BF16);
                // Large enough that ranks update a part each, in one case an uneven one.
                let even = params.root().param("even", (256, 128), Init::Constant(0.1));
                let odd = params
                    .root()
                    .param("odd", (257, 127), Init::kaiming_uniform(9));
                let session = Session::new(Device::Cpu, params).expect("a session");
                let session = session.with_threads(1);
                let world = world.with_strategy(strategy);
                let mut session = session.on(world.clone()).expect("it joins");
                let trace = Trace::training();
                let x = trace.input("x", F32, (2, 256));
                let [even, odd] = [even, odd].map(|w| trace.param(&w));
                let loss = x.matmul(even).square().mean() + odd.square().mean();
                trace.minimize(loss, AdamW::new(1e-3).master_weights().states_in(BF16));
                let step = session.compile(&trace, [loss]).expect("it compiles");
                for seed in 0..3 {
                    let mut draw = slabwise_models::noise(seed * 2 + world.rank() as u64);
                    let x = Array2::from_shape_simple_fn((2, 256), || draw() - 0.5);
                    session.run(&step, (&x,)).expect("a step");
                }
                let all = bits(&session).into_iter();
                all.filter(|(name, _)| ["even", "odd"].contains(&&**name))
                    .collect()
            };
            let ranks: Vec<_> = worlds
                .into_iter()
                .map(|world| scope.spawn(move || rank(world)))
                .collect();
            let results = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            results.collect()
        })
    };
    let [all, parts] = [Strategy::Replicated, Strategy::ShardedState].map(train);
    assert!(all[0].len() == 2 && all[0] == all[1] && parts[0] == parts[1]);
    assert!(all[0] == parts[0]);
}

/// What the documentation of `states_in` says of squares in f16.
#[test]
fn averages_of_squares_in_f16_lose_small_and_large_gradients() {
    let moved = |dtype: DType, gradient: f32, steps: usize| {
        let params = Params::seeded(4);
        let weight = params.root().param("w", (1,), Init::Constant(0.0));
        let trace = Trace::training();
        let loss = (trace.param(&weight) * gradient).sum();
        trace.minimize(loss, Adam::new(1e-3).states_in(dtype));
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let step = session.compile(&trace, [loss]).expect("it compiles");
        let at = |session: &Session| -session.value("w").expect("a weight")[[0]];
        for _ in 1..steps {
            session.run(&step, ()).expect("a step");
        }
        let before = at(&session);
        session.run(&step, ()).expect("a step");
        (at(&session) - before) / 1e-3
    };
    // A step is as long as the rate.
    for gradient in [1e-3, 0.1, 100.0, 300.0] {
        let length = moved(F32, gradient, 3000);
        assert!((length - 1.0).abs() < 0.01, "{gradient}: {length}");
    }
    let of_f16 = |gradient: f32| moved(F16, gradient, 3000);
    let (small, usual, large) = (of_f16(1e-3), of_f16(0.1), of_f16(300.0));
    assert!((30.0..33.0).contains(&small), "{small}");
    assert!((0.9..1.2).contains(&usual), "{usual}");
    assert_eq!(large, 0.0);
}
