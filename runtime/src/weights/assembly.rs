//! Tensors assembled from parts of others: permuted, split and joined without touching an element.

/// A tensor as boxes of other tensors' elements.
#[derive(Clone, Debug)]
pub(crate) struct Assembly {
    pub(super) shape: Vec<u64>,
    pub(super) pieces: Vec<Piece>,
    /// The indices of the rules that made it.
    pub(super) rules: Vec<usize>,
}

/// A box of a tensor, filled from one source.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// The index of the source tensor.
    pub(super) source: usize,
    /// The source's element of the box's first one, row-major.
    pub(super) at: u64,
    /// The distance in the source of neighbours along each axis of the box.
    pub(super) strides: Vec<u64>,
    /// The box's first index along each axis, and its lengths.
    pub(super) start: Vec<u64>,
    pub(super) lengths: Vec<u64>,
}

/// The distance of neighbours along each axis of a row-major tensor. Only without elements, which
/// nothing reads, can a distance be too large to count.
pub(super) fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = u64::saturating_mul(strides[axis], shape[axis].max(1));
    }
    strides
}

impl Assembly {
    /// A source as it is.
    pub(super) fn whole(source: usize, shape: &[u64]) -> Assembly {
        let piece = Piece {
            source,
            at: 0,
            strides: strides(shape),
            start: vec![0; shape.len()],
            lengths: shape.to_vec(),
        };
        Assembly {
            shape: shape.to_vec(),
            pieces: vec![piece],
            rules: Vec::new(),
        }
    }

    /// The tensor whose axis `i` is this one's axis `axes[i]`.
    pub(super) fn permuted(mut self, axes: &[usize]) -> Assembly {
        let pick = |values: &[u64]| axes.iter().map(|&axis| values[axis]).collect::<Vec<u64>>();
        self.shape = pick(&self.shape);
        for piece in &mut self.pieces {
            piece.strides = pick(&piece.strides);
            piece.start = pick(&piece.start);
            piece.lengths = pick(&piece.lengths);
        }
        self
    }

    /// The part from `start` on along an axis.
    pub(super) fn part(&self, axis: usize, start: u64, length: u64) -> Assembly {
        self.every(1, axis, start, length)
    }

    /// The part of `length` indices along an axis, from `start` on every `step`th.
    pub(super) fn every(&self, step: u64, axis: usize, start: u64, length: u64) -> Assembly {
        let mut part = self.clone();
        part.shape[axis] = length;
        part.pieces.retain_mut(|piece| {
            let begin = piece.start[axis];
            // The first index of the part that the piece has, and the one after its last.
            let index = |at: u64| at.saturating_sub(start).div_ceil(step).min(length);
            let (from, to) = (index(begin), index(begin + piece.lengths[axis]));
            let skipped = (start + from * step).saturating_sub(begin);
            let distance = skipped.saturating_mul(piece.strides[axis]);
            piece.at = piece.at.saturating_add(distance);
            piece.strides[axis] = piece.strides[axis].saturating_mul(step);
            piece.start[axis] = from;
            piece.lengths[axis] = to.saturating_sub(from);
            from < to
        });
        part
    }

    /// The tensor whose first axis is in `groups` equal parts, in each of which every `step`th index
    /// comes first, from the first on, then every `step`th from the second on.
    pub(super) fn dealt(self, groups: u64, step: u64) -> Assembly {
        let group = self.shape[0] / groups.max(1);
        let starts = (0..groups).flat_map(|at| (0..step).map(move |start| at * group + start));
        let parts = starts.map(|start| self.every(step, 0, start, group / step.max(1)));
        Assembly::joined(parts.collect(), 0)
    }

    /// The tensor of these along an axis, one after the other. They are equally long along all
    /// others, and the sum of their lengths along this one can be counted.
    pub(super) fn joined(parts: Vec<Assembly>, axis: usize) -> Assembly {
        let mut parts = parts.into_iter();
        let mut whole = parts.next().unwrap_or(Assembly {
            shape: Vec::new(),
            pieces: Vec::new(),
            rules: Vec::new(),
        });
        for part in parts {
            let behind = whole.shape[axis];
            whole.shape[axis] += part.shape[axis];
            whole
                .pieces
                .extend(part.pieces.into_iter().map(|mut piece| {
                    piece.start[axis] += behind;
                    piece
                }));
            whole.rules.extend(part.rules);
        }
        whole.rules.sort_unstable();
        whole.rules.dedup();
        whole
    }

    /// Its elements, row-major, if they are all of one source in that order.
    pub(super) fn is_whole(&self) -> bool {
        match &*self.pieces {
            [piece] => {
                piece.at == 0 && piece.lengths == self.shape && {
                    let plain = strides(&self.shape);
                    let axes = self.shape.iter().zip(plain.iter().zip(&piece.strides));
                    axes.into_iter().all(|(&n, (a, b))| n <= 1 || a == b)
                }
            }
            _ => false,
        }
    }
}
