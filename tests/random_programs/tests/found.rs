//! What random programs found, by hand: each failed before it was mended.

use ndarray::{Array1, arr1};
use slabwise::prelude::*;

/// Parts of a concatenation are written in the order of their kernels. A state that one of them reads and another one sets has to be
/// copied at the end, lest each waits for the other.
#[test]
fn a_state_is_set_to_a_part_of_what_is_joined_with_it() -> Result<()> {
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
        gave.push(joined.array::<f32>()?.into_dimensionality().expect("one axis"));
    }
    assert_eq!(gave, [arr1(&[1.0, 3.0]), arr1(&[1.0, 1.0])] as [Array1<f32>; 2]);
    Ok(())
}
