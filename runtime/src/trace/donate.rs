//! Inputs whose bytes become those of an output.

use std::panic::Location;

use super::Trace;
use super::handle::Tensor;
use crate::ops::Op;

impl Trace {
    /// Donates the bytes of an input to output `position` of the program: a
    /// [`Buffer`](crate::Buffer) fed to it by [`donate`](crate::Buffer::donate) holds that output
    /// after the run, and every earlier handle is invalid. Both have the same type and shape; each
    /// is donated at most once.
    #[track_caller]
    pub fn donate(&self, input: Tensor<'_>, position: usize) {
        let at = Location::caller();
        if input.is_poisoned() {
            return;
        }
        let mut building = self.building.borrow_mut();
        let found =
            std::ptr::eq(input.trace, self).then(|| building.graph.node(input.id).op.clone());
        let Some(Op::Input(i)) = found else {
            return building.mistake(
                at,
                "",
                "donate: only an input of this trace can be donated".into(),
            );
        };
        let twice = building
            .graph
            .inputs
            .iter()
            .any(|known| known.donated_to == Some(position as u32));
        let info = &mut building.graph.inputs[i as usize];
        let name = info.name.clone();
        if twice || info.donated_to.replace(position as u32).is_some() {
            building.mistake(
                at,
                "",
                format!("donate: input \"{name}\" or output {position} is donated a second time"),
            );
        }
    }
}
