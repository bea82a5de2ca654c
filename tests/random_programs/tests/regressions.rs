//! Findings of random programs, rewritten by hand; each failed before its fix.

use ndarray::{Array1, Array2, arr1};
use slabwise::Error;
use slabwise::prelude::*;

/// Parts of a concatenation are written in the order of their kernels. A state that one of them
/// reads and another one sets has to be copied at the end, because otherwise they depend on each
/// other.
#[test]
fn a_state_is_set_to_a_part_of_its_concatenation() -> Result<()> {
    let trace = Trace::inference();
    let state = trace.state("s", F32, [1], Init::Constant(3.0));
    let only = state.value().softmax(0);
    state.set(only);
    let joined = trace.concat(&[only, state.value()], 0);
    let mut session = Session::new(Device::Cpu, Params::seeded(0))?.with_threads(1);
    let program = session.compile(&trace, [joined])?;
    let mut gave = Vec::new();
    for _ in 0..2 {
        let [joined] = session.run(&program, ())?;
        gave.push(
            joined
                .array::<f32>()?
                .into_dimensionality()
                .expect("one axis"),
        );
    }
    assert_eq!(
        gave,
        [arr1(&[1.0, 3.0]), arr1(&[1.0, 1.0])] as [Array1<f32>; 2]
    );
    Ok(())
}

/// A part of a concatenation behind one of data-dependent length depends on that length, because
/// its offset is computed from it.
#[test]
fn a_part_behind_a_data_dependent_length_is_placed_behind_it() -> Result<()> {
    for kept in 0..=2 {
        let trace = Trace::inference();
        let x = trace.input("x", F32, [2]).cast(F16);
        let found = x.compress(0, x.gt(trace.input("least", F32, ())));
        let joined = trace.concat(&[x, found, x], 0);
        let mut session = Session::new(Device::Cpu, Params::seeded(0))?.with_threads(1);
        let program = session.compile(&trace, [joined.cast(F32)])?;
        let (x, least) = (arr1(&[0.5f32, 1.0]), ndarray::arr0(1.0 - 0.5 * kept as f32));
        let [joined] = session.run(&program, (&x, &least))?;
        let chosen = x.iter().filter(|x| **x > least[()]);
        let wanted: Vec<f32> = x.iter().chain(chosen).chain(&x).copied().collect();
        assert_eq!(
            joined.view::<f32>()?.iter().copied().collect::<Vec<_>>(),
            wanted
        );
    }
    Ok(())
}

/// The same across rows, because the stride of rows is computed from the data-dependent length too.
#[test]
fn strides_of_rows_include_a_data_dependent_length() -> Result<()> {
    let trace = Trace::inference();
    let x = trace.input("x", F32, [2, 2]).cast(F16);
    let found = x.compress(1, trace.input("mask", F32, [2]).gt(0.0));
    let joined = trace.concat(&[x, found, x], 1);
    let mut session = Session::new(Device::Cpu, Params::seeded(0))?.with_threads(1);
    let program = session.compile(&trace, [joined.cast(F32)])?;
    let x = ndarray::arr2(&[[1.0f32, 2.0], [3.0, 4.0]]);
    let [joined] = session.run(&program, (&x, &arr1(&[0.0f32, 1.0])))?;
    let wanted = ndarray::arr2(&[[1.0f32, 2.0, 2.0, 1.0, 2.0], [3.0, 4.0, 4.0, 3.0, 4.0]]);
    assert_eq!(joined.array::<f32>()?, wanted.into_dyn());
    Ok(())
}

/// A sum over a batch of rows without elements, where a budget makes the planner try micro-batches.
#[test]
fn an_empty_sum_over_a_batch_within_a_budget() -> Result<()> {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("batch", 2), 2));
    let sum = x.slice(1, 0..0).sum_over(0);
    let mut session = Session::new(Device::Cpu, Params::seeded(0))?
        .with_threads(1)
        .with_budget(Budget::Fraction(0.8));
    match session.compile(&trace, [sum]) {
        Ok(program) => assert_eq!(
            session.run(&program, (&Array2::<f32>::ones((1, 2)),))?[0].shape(),
            [0]
        ),
        Err(error) => assert!(matches!(error, Error::Budget { .. }), "{error}"),
    }
    Ok(())
}

/// Reductions over axes without elements have results too, and registers with room for them: no
/// other memory is written.
#[test]
fn empty_reductions_write_only_their_results() -> Result<()> {
    for n in [1, 6, 100, 1000] {
        let trace = Trace::inference();
        let beside = trace.input("beside", F32, [n]);
        let x = trace.input("x", F32, [0, n, 0]);
        let outputs = [
            beside * 1.0,
            x.cast(Bool).all_over([0, 2]).cast(F32),
            x.sum_over([0, 2]) + 2.0,
            x.prod_over([0, 2]),
            x.permute([1, 0, 2]).sum_over([1, 2]),
            x.slice(2, 0..0)
                .transpose(0, 1)
                .cast(I32)
                .prod_over([1, 2])
                .cast(F32),
        ];
        let mut session = Session::new(Device::Cpu, Params::seeded(0))?.with_threads(2);
        let program = session.compile(&trace, outputs)?;
        let (beside, x) = (
            Array1::from_elem(n, 7.0f32),
            ndarray::Array3::<f32>::zeros((0, n, 0)),
        );
        let gave = session.run(&program, (&beside, &x))?;
        for (output, wanted) in gave.iter().zip([7.0, 1.0, 2.0, 1.0, 0.0, 1.0]) {
            assert_eq!(
                output.array::<f32>()?,
                Array1::from_elem(n, wanted).into_dyn(),
                "{n} results"
            );
        }
    }
    Ok(())
}

/// A value of data-dependent length written in micro-batches under a budget is in the memory that
/// the run allocated for it.
#[test]
fn micro_batches_write_values_of_data_dependent_length() -> Result<()> {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (Dim::bounded("batch", 5), 1));
    let chosen = x.compress(1, trace.input("mask", Bool, [1]));
    let mut session = Session::new(Device::Cpu, Params::seeded(0))?
        .with_threads(1)
        .with_budget(Budget::Fraction(0.8));
    let program = session.compile(&trace, [chosen])?;
    for (batch, keep) in [(1, 1u8), (5, 1), (5, 0)] {
        let x = Array2::from_shape_fn((batch, 1), |(i, _)| i as f32 + 0.5);
        let [chosen] = session.run(&program, (&x, &arr1(&[keep])))?;
        let wanted = x.slice(ndarray::s![.., ..usize::from(keep)]).to_owned();
        assert_eq!(chosen.array::<f32>()?, wanted.into_dyn());
    }
    Ok(())
}
