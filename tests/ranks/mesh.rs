//! Meshes: exchanges along an axis against plain code, training along the data axis, errors.

use ndarray::{Array2, ArrayD, Axis, IxDyn, Zip};
use slabwise::nn::Linear;
use slabwise::optim::Sgd;
use slabwise::prelude::*;
use slabwise::{Error, Mesh, Strategy, World};

use super::{both, on_each, saved, train};

/// The ranks that have the coordinates of this one along all axes but one.
fn members(sizes: &[usize], axis: usize, rank: usize) -> Vec<usize> {
    let coordinates = |rank: usize| {
        let mut rest = rank;
        let digits = sizes.iter().rev().map(|size| {
            let digit = rest % size;
            rest /= size;
            digit
        });
        let mut digits: Vec<usize> = digits.collect();
        digits.reverse();
        digits
    };
    let others = |rank: usize| {
        let mut all = coordinates(rank);
        all.remove(axis);
        all
    };
    let all: usize = sizes.iter().product();
    (0..all).filter(|r| others(*r) == others(rank)).collect()
}

/// The sum of arrays in the tree of up to four.
fn tree_sum(all: &[ArrayD<f32>]) -> ArrayD<f32> {
    match all {
        [a, b, c, d] => (a + b) + (c + d),
        _ => all[1..].iter().fold(all[0].clone(), |sum, x| sum + x),
    }
}

/// An exchange along an axis.
#[derive(Clone, Copy, Debug)]
enum Exchange {
    Sum,
    Mean,
    Gather(usize),
    Scatter(usize),
    Exchange(usize, usize),
}

impl Exchange {
    const ALL: [Exchange; 8] = [
        Exchange::Sum,
        Exchange::Mean,
        Exchange::Gather(0),
        Exchange::Gather(1),
        Exchange::Scatter(0),
        Exchange::Scatter(1),
        Exchange::Exchange(0, 1),
        Exchange::Exchange(1, 1),
    ];

    fn record<'t>(self, x: Tensor<'t>, axis: &str) -> Tensor<'t> {
        match self {
            Exchange::Sum => x.sum_across(axis),
            Exchange::Mean => x.mean_across(axis),
            Exchange::Gather(dim) => x.gather_across(axis, dim),
            Exchange::Scatter(dim) => x.scatter_across(axis, dim),
            Exchange::Exchange(from, to) => x.exchange_across(axis, from, to),
        }
    }

    /// Its result at a place among ranks that give these arrays.
    fn plain(self, place: usize, given: &[ArrayD<f32>]) -> ArrayD<f32> {
        let part = |x: &ArrayD<f32>, dim: usize| {
            let each = x.len_of(Axis(dim)) / given.len();
            let own = place * each..(place + 1) * each;
            x.slice_axis(Axis(dim), own.into()).to_owned()
        };
        let join = |parts: &[ArrayD<f32>], dim: usize| {
            let views: Vec<_> = parts.iter().map(|p| p.view()).collect();
            ndarray::concatenate(Axis(dim), &views).expect("they fit")
        };
        match self {
            Exchange::Sum => tree_sum(given),
            Exchange::Mean => tree_sum(given) * (1.0 / given.len() as f32),
            Exchange::Gather(dim) => join(given, dim),
            Exchange::Scatter(dim) => part(&tree_sum(given), dim),
            Exchange::Exchange(from, to) => {
                let parts: Vec<_> = given.iter().map(|x| part(x, from)).collect();
                join(&parts, to)
            }
        }
    }
}

/// A weight for each element of a result, which differs from rank to rank.
fn weights(shape: &[usize], rank: usize) -> ArrayD<f32> {
    let elements: usize = shape.iter().product();
    let weight = |at: usize| ((at * 7 + rank * 3) % 11) as f32 - 5.0;
    ArrayD::from_shape_vec(IxDyn(shape), (0..elements).map(weight).collect()).expect("it fits")
}

/// The bits of a result, and its gradient's, of every exchange along an axis on a rank of a mesh.
fn exchange(
    mesh: &Mesh,
    axis: &str,
    x: &ArrayD<f32>,
    shapes: &[Vec<usize>],
) -> Result<Vec<ArrayD<f32>>> {
    let params = Params::seeded(3);
    let one = params.root().param("one", (), Init::Constant(1.0));
    let mut session = Session::new(Device::Cpu, params)?
        .with_threads(1)
        .on(mesh.clone())?;
    let rank = session.world().rank();
    let mut all = Vec::new();
    for (exchange, shape) in Exchange::ALL.into_iter().zip(shapes) {
        let trace = Trace::inference();
        let input = trace.input("x", F32, x.shape());
        let weight = trace.input("weight", F32, shape.as_slice());
        let y = exchange.record(input * trace.param(&one), axis);
        let [slope] = trace.gradients((y * weight).sum(), [input]);
        let program = session.compile(&trace, [y, slope])?;
        let [y, slope] = session.run(&program, (x, &weights(shape, rank)))?;
        all.extend([y.array::<f32>()?, slope.array::<f32>()?]);
    }
    Ok(all)
}

#[test]
fn exchanges_along_an_axis_are_those_of_plain_code() {
    for (sizes, shape) in [
        ([2, 2], [4, 6]),
        ([2, 3], [6, 12]),
        ([4, 1], [4, 8]),
        // A sum of which each rank adds up a part.
        ([2, 2], [128, 132]),
    ] {
        let ranks = sizes[0] * sizes[1];
        let of_rank = |rank: usize| {
            let mut draw = slabwise_models::noise(rank as u64 + 1);
            ArrayD::from_shape_simple_fn(IxDyn(&shape), || (draw() * 64.0).round() / 8.0 - 4.0)
        };
        let given: Vec<ArrayD<f32>> = (0..ranks).map(of_rank).collect();
        for (at, axis) in ["data", "model"].into_iter().enumerate() {
            let among = |rank: usize| {
                let members = members(&sizes, at, rank);
                let place = members.iter().position(|r| *r == rank).expect("itself");
                (members, place)
            };
            let results: Vec<Vec<ArrayD<f32>>> = Exchange::ALL
                .into_iter()
                .map(|exchange| {
                    let result = |rank: usize| {
                        let (members, place) = among(rank);
                        let theirs: Vec<_> = members.iter().map(|r| given[*r].clone()).collect();
                        exchange.plain(place, &theirs)
                    };
                    (0..ranks).map(result).collect()
                })
                .collect();
            let shapes: Vec<Vec<usize>> = results.iter().map(|r| r[0].shape().to_vec()).collect();
            let worlds = World::local(ranks).expect("a world");
            let ran = on_each(worlds, |world| {
                let rank = world.rank();
                let mesh = world.mesh([("data", sizes[0]), ("model", sizes[1])])?;
                exchange(&mesh, axis, &given[rank], &shapes)
            });
            for (rank, ran) in ran.into_iter().enumerate() {
                let ran = ran.expect("it runs");
                for (of, exchange) in Exchange::ALL.into_iter().enumerate() {
                    let told = format!("{exchange:?} along {axis} on rank {rank} of {sizes:?}");
                    assert_eq!(ran[2 * of], results[of][rank], "{told}");
                    // What an element adds to the sum of what all ranks compute.
                    let (members, _) = among(rank);
                    let x = &given[rank];
                    let few = if x.len() > 1000 { 5 } else { 48 };
                    let some = (0..x.len()).step_by(1 + x.len() / few);
                    for element in some {
                        let unit = |r: usize| {
                            let mut unit = ArrayD::zeros(x.raw_dim());
                            if r == rank {
                                unit.as_slice_mut().expect("contiguous")[element] = 1.0;
                            }
                            unit
                        };
                        let units: Vec<_> = members.iter().map(|r| unit(*r)).collect();
                        let each = members.iter().enumerate().map(|(place, r)| {
                            let y = exchange.plain(place, &units);
                            let w = weights(y.shape(), *r);
                            Zip::from(&y).and(&w).fold(0.0, |sum, y, w| sum + y * w)
                        });
                        let wanted: f32 = each.sum();
                        let slope = ran[2 * of + 1].as_slice().expect("contiguous")[element];
                        assert!(
                            (slope - wanted).abs() < 1e-5,
                            "{told}: {slope}, not {wanted}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn meshes_have_the_bits_and_the_bytes_of_their_data_axis() {
    type Made = fn(&World) -> Result<Mesh>;
    let in_world = |ranks: usize, strategy: Strategy, made: Option<Made>| {
        let worlds = World::local(ranks).expect("a world");
        on_each(worlds, |world| {
            let world = world.with_strategy(strategy);
            let world: World = match made {
                Some(made) => made(&world)?.with_grains(4)?.into(),
                None => world.with_grains(4)?,
            };
            let (session, losses) = train(&world, 24, 3)?;
            let losses: Vec<u32> = losses.iter().map(|l| l.to_bits()).collect();
            Ok::<_, Error>((saved(&session), losses, world.sent_bytes()))
        })
    };
    let alone = in_world(1, Strategy::Replicated, None).swap_remove(0);
    let (file, losses, _) = alone.expect("it trains");
    let square: Made = |world| world.mesh([("data", 2), ("model", 2)]);
    let turned: Made = |world| {
        world
            .mesh([("model", 2), ("data", 2)])?
            .with_data_axis("data")
    };
    let idle: Made = |world| world.mesh([("data", 1), ("model", 4)]);
    let deep: Made = |world| world.mesh([("data", 2), ("model", 1), ("x", 2), ("y", 1)]);
    for (_, strategy) in both(&[4]) {
        let two = in_world(2, strategy, None)
            .swap_remove(0)
            .expect("it trains");
        for (name, made, sent) in [
            ("2 x 2", square, two.2),
            ("2 x 2, data last", turned, two.2),
            ("1 x 4", idle, 0),
            ("2 x 1 x 2 x 1", deep, two.2),
        ] {
            let ran = in_world(4, strategy, Some(made));
            for (rank, ran) in ran.into_iter().enumerate() {
                let (own, own_losses, own_sent) = ran.expect("it trains");
                let told = format!("{name}, {strategy:?}, rank {rank}");
                assert_eq!(own_losses, losses, "{told}");
                assert!(rank > 0 || own == file, "{told}: weights or state");
                assert_eq!(own_sent, sent, "{told}");
            }
        }
    }
}

/// Trains a perceptron whose hidden features the ranks along "model" compute in parts; the weights.
fn perceptron(mesh: Option<Mesh>, rows: usize) -> Result<Vec<f32>> {
    let params = Params::seeded(5);
    let at = &params.root();
    let (first, last) = (
        Linear::new(at / "first", 3, 8),
        Linear::new(at / "last", 8, 2),
    );
    let parts = mesh.as_ref().map_or(Ok(1), |mesh| mesh.size("model"))?;
    let is_parallel = mesh.is_some();
    let mut session = Session::new(Device::Cpu, params)?.with_threads(1);
    if let Some(mesh) = mesh {
        session = session.on(mesh)?;
    }
    let own = session.world().share(rows);
    let trace = Trace::training();
    let x = trace.input("x", F32, (own.len(), 3));
    let hidden = x.apply(&first).tanh();
    let hidden = if is_parallel {
        // The rank's part of the features, from its place along the axis; the others are zeros.
        let place = trace.coordinate("model");
        let (feature, each) = (trace.arange(8), 8 / parts as i32);
        let own = feature.ge(place * each).and(feature.lt((place + 1) * each));
        let hidden = hidden * own.cast(F32);
        // Each part is made whole on its way through the ranks.
        hidden.scatter_across("model", 1).gather_across("model", 1)
    } else {
        hidden
    };
    let y = hidden.apply(&last);
    let loss = y.square().mean();
    trace.minimize(loss, Sgd::new(0.3));
    let step = session.compile(&trace, [loss])?;
    let all = Array2::from_shape_fn((rows, 3), |(i, j)| ((i * 3 + j) as f32 * 0.7).sin());
    let x = all.slice_axis(Axis(0), own.into()).to_owned();
    for _ in 0..4 {
        session.run(&step, &x)?;
    }
    let names: Vec<String> = session.names().map(str::to_string).collect();
    let values = names
        .iter()
        .map(|name| session.value(name).expect("it is there"));
    Ok(values.flatten().collect())
}

#[test]
fn weights_that_ranks_use_in_part_learn_from_all_of_them() {
    let alone = perceptron(None, 12).expect("it trains");
    for sizes in [[2, 2], [1, 4], [1, 2]] {
        let worlds = World::local(sizes[0] * sizes[1]).expect("a world");
        let ran = on_each(worlds, |world| {
            let mesh = world.mesh([("data", sizes[0]), ("model", sizes[1])])?;
            perceptron(Some(mesh), 12)
        });
        let ran: Vec<Vec<f32>> = ran.into_iter().map(|r| r.expect("it trains")).collect();
        for weights in &ran {
            assert_eq!(weights, &ran[0], "every rank has the same weights");
            let off = weights.iter().zip(&alone).map(|(a, b)| (a - b).abs());
            let off = off.fold(0.0, f32::max);
            assert!(off < 2e-6, "{sizes:?} is off by {off}");
        }
        assert_eq!(ran[0].len(), alone.len());
    }
}

#[test]
fn a_mesh_of_one_rank_needs_no_others() {
    let mesh = World::alone()
        .mesh([("data", 1), ("model", 1)])
        .expect("it fits");
    let x = ArrayD::from_shape_fn(IxDyn(&[2, 4]), |at| (at[0] * 4 + at[1]) as f32);
    let shapes = vec![vec![2, 4]; Exchange::ALL.len()];
    let ran = exchange(&mesh, "model", &x, &shapes).expect("it runs");
    for pair in ran.chunks(2) {
        assert_eq!(pair[0], x);
        assert_eq!(pair[1], weights(&[2, 4], 0));
    }
}

#[test]
fn a_mesh_says_where_its_ranks_are() {
    let meshes = World::local(12).expect("a world").into_iter();
    let meshes = meshes.map(|w| w.mesh([("data", 2), ("seq", 3), ("model", 2)]).expect("12"));
    for (rank, mesh) in meshes.enumerate() {
        let axes: Vec<_> = mesh.axes().collect();
        assert_eq!(axes, [("data", 2), ("seq", 3), ("model", 2)]);
        let at = ["data", "seq", "model"].map(|axis| mesh.coordinate(axis).expect("it is there"));
        assert_eq!(at[0] * 6 + at[1] * 2 + at[2], rank);
        assert_eq!(mesh.size("seq").expect("it is there"), 3);
        assert_eq!(mesh.world().share(10), at[0] * 5..(at[0] + 1) * 5);
        assert_eq!((mesh.world().rank(), mesh.world().ranks()), (rank, 12));
        let mesh = mesh.with_data_axis("seq").expect("it is there");
        assert_eq!(
            (mesh.world().grains(), mesh.world().share(9)),
            (3, at[1] * 3..(at[1] + 1) * 3)
        );
    }
}

#[test]
fn mistakes_in_meshes_name_the_numbers() {
    let world = World::local(4).expect("a world").swap_remove(0);
    let told = |made: Result<Mesh>| made.expect_err("a mistake").to_string();
    for (axes, words) in [
        (
            vec![("data", 3), ("model", 2)],
            "a mesh of 3 x 2 is 6 ranks, and the world has 4; start as many ranks, or choose sizes \
             whose product is 4",
        ),
        (
            vec![("data", usize::MAX), ("model", 2)],
            "is too many ranks, and the world has 4",
        ),
        (vec![], "a mesh of 0 axes; it has 1 to 4"),
        (
            vec![("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 4)],
            "a mesh of 5 axes; it has 1 to 4",
        ),
        (vec![("data", 2), ("", 2)], "axis 1 of a mesh has no name"),
        (
            vec![("data", 2), ("data", 2)],
            "two axes of a mesh are named \"data\"",
        ),
        (
            vec![("data", 4), ("model", 0)],
            "axis \"model\" of a mesh has 0 ranks; an axis that is not used has 1",
        ),
    ] {
        let error = told(world.mesh(axes));
        assert!(error.contains(words), "{error}");
    }
    let square = || world.mesh([("data", 2), ("model", 2)]);
    let error = told(square().and_then(|mesh| mesh.with_data_axis("modle")));
    assert!(
        error.contains("no axis \"modle\"; the mesh has \"data\" of 2, \"model\" of 2"),
        "{error}"
    );
    let error = square()
        .expect("it fits")
        .coordinate("x")
        .expect_err("none")
        .to_string();
    assert!(error.contains("no axis \"x\"; the mesh has"), "{error}");
    let error = told(square().and_then(|mesh| mesh.with_grains(3)));
    let words = "3 grains over 2 ranks of the data axis: data axes of 1, 3 ranks can share them";
    assert!(error.contains(words), "{error}");
    let four = world.clone().with_grains(4).expect("they share them");
    assert_eq!(
        four.mesh([("data", 2), ("model", 2)])
            .expect("2")
            .world()
            .grains_per_rank(),
        2
    );
    let three = World::local(3).expect("a world").swap_remove(0);
    let three = three.with_grains(3).expect("they share them");
    assert!(three.mesh([("data", 3)]).is_ok());

    let params = Params::seeded(3);
    let weight = params.root().param("weight", [5, 6], Init::Constant(1.0));
    let bias = params.root().param("bias", (), Init::Constant(1.0));
    let session = Session::new(Device::Cpu, params.clone()).expect("a session");
    let mut session = session.on(square().expect("it fits")).expect("it joins");
    let mut compile = |record: for<'t> fn(Tensor<'t>) -> Tensor<'t>| {
        let trace = Trace::inference();
        let x = record(trace.param(&weight) * trace.param(&bias));
        session
            .plan(&trace, [x])
            .map(drop)
            .expect_err("a mistake")
            .to_string()
    };
    for (record, words) in [
        (
            (|x| x.sum_across("modle")) as for<'t> fn(Tensor<'t>) -> Tensor<'t>,
            "sum_across(\"modle\"): no axis \"modle\"; the mesh has \"data\" of 2, \"model\" of 2",
        ),
        (
            |x| x.scatter_across("model", 0),
            "scatter_across(\"model\", 0) of f32 [5, 6]: 2 ranks share dimension 0 in equal parts; \
             it must be a multiple of 2",
        ),
        (
            |x| x.exchange_across("data", 0, 1),
            "exchange_across(\"data\", 0, 1) of f32 [5, 6]: 2 ranks share dimension 0",
        ),
        (
            |x| x.gather_across("model", 2),
            "gather_across(\"model\", 2) of f32 [5, 6]: it has no dimension 2",
        ),
        (
            |x| x.cast(I32).mean_across("model"),
            "mean_across(\"model\") does not take i32; convert with cast",
        ),
        (
            |x| x.gt(0.0).sum_across("model"),
            "sum_across(\"model\") does not take bool; convert with cast",
        ),
    ] {
        let error = compile(record);
        assert!(error.contains(words), "{error}");
    }

    // A session without a mesh.
    let params = Params::seeded(3);
    let weight = params.root().param("weight", [2], Init::Constant(1.0));
    let session = Session::new(Device::Cpu, params).expect("a session");
    let session = session.on(world.clone()).expect("it joins");
    let trace = Trace::inference();
    let sum = trace.param(&weight).sum_across("model");
    let error = session
        .plan(&trace, [sum])
        .map(drop)
        .expect_err("no axes")
        .to_string();
    let words =
        "no axis \"model\"; the session is on a world without axes, which World::mesh gives it";
    assert!(error.contains(words), "{error}");
    let session = Session::new(Device::Cpu, Params::seeded(3)).expect("a session");
    let trace = Trace::inference();
    let sum = trace.input("x", F32, (2,)).sum_across("model");
    let error = session
        .plan(&trace, [sum])
        .map(drop)
        .expect_err("no mesh")
        .to_string();
    assert!(
        error.contains("no mesh is known") && error.contains("read a parameter"),
        "{error}"
    );
}
