//! The operands of convolutions.

use smallvec::{SmallVec, smallvec};

use super::{Access, Conv2d, ConvKind, Dims, Operand};
use crate::size::Size;

impl Conv2d {
    /// The number of arguments before `b`.
    pub fn sources(&self) -> usize {
        self.prologue
            .as_ref()
            .map_or(1, |prologue| prologue.operands.len().saturating_sub(1))
    }

    /// The operands with their spaces, in the order of the arguments.
    pub(super) fn operands(&self) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let of = |sizes: [Size; 4]| Dims::from_slice(&sizes);
        let image = of([self.n, self.ci, self.hw[0], self.hw[1]]);
        let result = of([self.n, self.co, self.ohw[0], self.ohw[1]]);
        let per_group = self.ci.checked_div(self.groups as i64).unwrap_or(self.ci);
        let [height, width] = self.k.map(|length| Size::fixed(length as i64));
        let weight = of([self.co, per_group, height, width]);
        let (a, b) = match self.kind {
            ConvKind::Forward => (image, weight),
            ConvKind::InputGrad => (result, weight),
            ConvKind::WeightGrad => (image, result),
        };
        let mut list: SmallVec<[(Operand, Dims, Access); 3]> = match &self.prologue {
            Some(prologue) => {
                let arguments = prologue.arguments().into_iter();
                arguments.take(self.sources()).collect()
            }
            None => smallvec![(self.a.clone(), a, Access::Read)],
        };
        list.push((self.b.clone(), b, Access::Read));
        list
    }
}
