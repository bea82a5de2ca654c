//! Max pooling and the positions of its maxima in one kernel.

use rustc_hash::FxHashMap;
use slabwise_kernels::spec::PoolKind;

use super::Builder;
use crate::ops::{NodeId, Op};

impl Builder<'_> {
    /// A max pooling and the positions of its maxima read the same windows: one kernel writes both.
    pub(super) fn pair_positions(&mut self) {
        let mut largest: FxHashMap<NodeId, Vec<NodeId>> = FxHashMap::default();
        for id in self.graph.ids().filter(|id| self.places[id.at()].is_some()) {
            if let Op::Pool2d(PoolKind::Max, _) = self.graph.node(id).op {
                largest
                    .entry(self.graph.node(id).inputs[0])
                    .or_default()
                    .push(id);
            }
        }
        for id in self.graph.ids() {
            let Op::Pool2d(PoolKind::ArgMax, window) = self.graph.node(id).op else {
                continue;
            };
            let Some(place) = self.places[id.at()].clone() else {
                continue;
            };
            // Positions are written by the pooling itself, into a buffer.
            if self.users[id.at()]
                .iter()
                .any(|(user, _)| matches!(self.graph.node(*user).op, Op::Assign(_)))
            {
                continue;
            }
            let of_same = largest
                .get(&self.graph.node(id).inputs[0])
                .into_iter()
                .flatten()
                .copied();
            // Of equal windows, one may have another one at the end of an axis.
            let node = self.graph.node(id);
            let twin = of_same.into_iter().find(|t| {
                let of = self.graph.node(*t);
                of.op == Op::Pool2d(PoolKind::Max, window) && of.dims == node.dims
            });
            let Some(twin) = twin else { continue };
            let into = self.places[twin.at()].as_ref().expect("just found").cluster;
            if self.list[place.cluster].members.len() > 1
                || self.list[into].anchor != Some(twin)
                || self.list[into].positions.is_some()
                || !self.options.epilogues
                || self.reaches(into, place.cluster)
                || self.reaches(place.cluster, into)
            {
                continue;
            }
            self.absorb(into, place.cluster);
            self.list[into].positions = Some(id);
        }
    }
}
