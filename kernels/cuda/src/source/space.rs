//! Iteration spaces of loops under construction: axes in memory order, contiguous ones merged.

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Spec;

use super::params::Params;
use crate::code::{Code, Site};

/// The axes of a loop, and the strided accesses of operands and indices along them.
#[derive(Clone, Debug)]
pub struct Space {
    /// Sizes.
    pub dims: Vec<Size>,
    /// First elements and strides of the accesses: of the operands, then of the indices, then of
    /// the anchor.
    pub accesses: Vec<(Size, Vec<Size>)>,
    operands: usize,
    indices: usize,
}

impl Space {
    /// The space of a spec.
    pub fn new(spec: &Spec) -> Space {
        let operands = spec.operands.iter().map(|o| (o.offset, o.strides.to_vec()));
        let indices = spec.indices.iter().map(|i| (Size::ZERO, i.to_vec()));
        Space {
            dims: spec.dims.to_vec(),
            accesses: operands.chain(indices).collect(),
            operands: spec.operands.len(),
            indices: spec.indices.len(),
        }
    }

    /// A space without accesses of a program.
    pub fn over(dims: &[Size]) -> Space {
        Space {
            dims: dims.to_vec(),
            accesses: vec![],
            operands: 0,
            indices: 0,
        }
    }

    /// Adds an access, and returns its number.
    pub fn push(&mut self, offset: Size, strides: &[Size]) -> usize {
        self.accesses.push((offset, strides.to_vec()));
        self.accesses.len() - 1
    }

    /// The offset of access `number` at these coordinates.
    pub fn place(&self, params: &mut Params, number: usize, coordinates: &[String]) -> String {
        let (offset, strides) = &self.accesses[number];
        params.dot(strides, coordinates, *offset)
    }

    /// Stride of operand `k` along an axis.
    pub fn stride(&self, k: u16, axis: usize) -> Size {
        self.accesses[usize::from(k)].1[axis]
    }

    /// Reorders the axes.
    pub fn permute(&mut self, order: &[usize]) {
        self.dims = order.iter().map(|&a| self.dims[a]).collect();
        for (_, strides) in &mut self.accesses {
            *strides = order.iter().map(|&a| strides[a]).collect();
        }
    }

    /// Merges neighbouring axes between `from` and `to` that are contiguous in every access, and
    /// drops those of length 1. Returns the number of axes left between them.
    pub fn merge(&mut self, from: usize, to: usize) -> usize {
        let mut end = to;
        let mut axis = from;
        while axis < end {
            if self.dims[axis].is(1) {
                self.remove(axis);
                end -= 1;
            } else {
                axis += 1;
            }
        }
        let mut axis = from;
        while axis + 1 < end {
            let inner = self.dims[axis + 1];
            let one =
                |strides: &[Size]| strides[axis + 1].checked_mul(inner) == Some(strides[axis]);
            match self.dims[axis].checked_mul(inner) {
                Some(both) if self.accesses.iter().all(|(_, strides)| one(strides)) => {
                    self.dims[axis + 1] = both;
                    self.remove(axis);
                    end -= 1;
                }
                _ => axis += 1,
            }
        }
        end - from
    }

    /// Adds an axis of length 1.
    pub fn insert(&mut self, axis: usize) {
        self.dims.insert(axis, Size::ONE);
        self.accesses
            .iter_mut()
            .for_each(|(_, strides)| strides.insert(axis, Size::ZERO));
    }

    fn remove(&mut self, axis: usize) {
        self.dims.remove(axis);
        for (_, strides) in &mut self.accesses {
            strides.remove(axis);
        }
    }

    /// The element of operand `k` at these coordinates.
    pub fn element(&self, params: &mut Params, k: u16, coordinates: &[String]) -> String {
        self.place(params, usize::from(k), coordinates)
    }

    /// The value of index `k` at these coordinates.
    pub fn index(&self, params: &mut Params, k: u16, coordinates: &[String]) -> String {
        format!(
            "int({})",
            self.place(params, self.operands + usize::from(k), coordinates)
        )
    }

    /// The number of points under `env`.
    pub fn points(&self, env: &Env) -> i64 {
        points(&self.dims, env)
    }
}

/// The number of neighbours along `axis` that a thread processes: vectors of 16 bytes of the widest
/// type, if the elements of all these accesses (with their bytes) that vary along it are contiguous
/// and aligned; `remainder` says whether a remainder is allowed.
pub fn vector_width(space: &Space, used: &[(usize, usize)], axis: usize, remainder: bool) -> i64 {
    let along = |access: usize| space.accesses[access].1[axis];
    if used
        .iter()
        .any(|&(access, _)| !along(access).is(0) && !along(access).is(1))
    {
        return 1;
    }
    let moved: Vec<(usize, usize)> = used
        .iter()
        .copied()
        .filter(|&(access, _)| along(access).is(1))
        .collect();
    let Some(widest) = moved.iter().map(|&(_, bytes)| bytes).max() else {
        return 1;
    };
    let fits = |width: i64| {
        let whole = |size: Size| size.checked_div(width).is_some();
        let lies = |&(access, _): &(usize, usize)| {
            let (offset, strides) = &space.accesses[access];
            whole(*offset)
                && strides
                    .iter()
                    .enumerate()
                    .all(|(a, s)| a == axis || whole(*s))
        };
        (remainder || whole(space.dims[axis])) && moved.iter().all(lies)
    };
    let mut width = 16 / widest as i64;
    while width > 1 && !fits(width) {
        width /= 2;
    }
    width
}

/// The accesses of a program's loads and stores, with the bytes of their elements.
pub fn touched(code: &Code) -> Vec<(usize, usize)> {
    let used = code
        .loads()
        .into_iter()
        .chain(code.spec.stores.iter().map(|s| s.operand))
        .map(usize::from);
    used.map(|k| (k, code.spec.operands[k].dtype.bytes()))
        .collect()
}

/// The number of points of a space under `env`.
pub fn points(dims: &[Size], env: &Env) -> i64 {
    dims.iter()
        .fold(1i64, |p, d| p.saturating_mul(d.at(env).max(0)))
}

/// The order of axes `from..to` by decreasing stride of an operand with these strides; axes along
/// which it is broadcast come first.
pub fn memory_order(strides: &[Size], from: usize, to: usize, bounds: &Env) -> Vec<usize> {
    let mut order: Vec<usize> = (from..to).collect();
    let key = |axis: &usize| {
        if strides[*axis].is(0) {
            u64::MAX
        } else {
            strides[*axis].at(bounds).unsigned_abs()
        }
    };
    order.sort_by_key(|axis| std::cmp::Reverse(key(axis)));
    order
}

/// A point given by the names of its coordinates; operand `k` is the pointer `a{k}`.
pub struct Point {
    elements: Vec<String>,
    indices: Vec<String>,
    acc: String,
}

impl Point {
    /// The point of a space at these coordinates.
    pub fn new(space: &Space, params: &mut Params, coordinates: &[String], acc: &str) -> Point {
        let operands = space.operands;
        let elements = (0..operands)
            .map(|k| space.element(params, k as u16, coordinates))
            .collect();
        let indices = (0..space.indices)
            .map(|k| space.index(params, k as u16, coordinates))
            .collect();
        Point {
            elements,
            indices,
            acc: acc.into(),
        }
    }

    /// The element of operand `k`.
    pub fn element(&self, k: u16) -> &str {
        &self.elements[usize::from(k)]
    }
}

impl Site for Point {
    fn read(&self, k: u16) -> String {
        format!("a{k}[{}]", self.element(k))
    }
    fn write(&self, k: u16) -> String {
        self.read(k)
    }
    fn state(&self, k: u16) -> String {
        format!("a{k} + {}", self.element(k))
    }
    fn index(&self, k: u16) -> String {
        self.indices[usize::from(k)].clone()
    }
    fn acc(&self) -> String {
        self.acc.clone()
    }
}

/// A replacement expression for an operand of a point that is not read or written in memory.
pub type Elsewhere<'a> = &'a dyn Fn(u16) -> Option<String>;

/// A point some of whose elements are read or written elsewhere than in memory.
pub struct Via<'a> {
    /// The point.
    pub point: Point,
    /// Replaces reads.
    pub read: Elsewhere<'a>,
    /// Replaces writes.
    pub write: Elsewhere<'a>,
}

impl Site for Via<'_> {
    fn read(&self, k: u16) -> String {
        (self.read)(k).unwrap_or_else(|| self.point.read(k))
    }
    fn write(&self, k: u16) -> String {
        (self.write)(k).unwrap_or_else(|| self.point.write(k))
    }
    fn state(&self, k: u16) -> String {
        self.point.state(k)
    }
    fn index(&self, k: u16) -> String {
        self.point.index(k)
    }
    fn acc(&self) -> String {
        self.point.acc()
    }
}

/// Declares the pointers `a0`, `a1`, … of the operands of `code`, whose arguments follow those of
/// the anchor.
pub fn pointers(code: &Code, params: &mut Params) -> String {
    let anchor = code.spec.body.operands(&code.spec.dims).len();
    (0..code.spec.operands.len())
        .map(|k| params.pointer(&format!("a{k}"), code.storage(k as u16).ty, anchor + k))
        .collect()
}
