//! A cache of prepared kernels, and the map of specs that it is based on.

use std::cell::RefCell;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHasher};
use slabwise_kernels::cpu::SpecError;
use slabwise_kernels::size::{Env, Symbol};
use slabwise_kernels::spec::{Body, Inst, Spec};

use super::{Choice, Kernel, Target};

/// A map whose keys are specs, compared bit by bit, each with a further key.
#[derive(Debug)]
pub(super) struct SpecMap<K, V> {
    entries: FxHashMap<u64, Vec<(Spec, K, V)>>,
}

impl<K, V> Default for SpecMap<K, V> {
    fn default() -> Self {
        SpecMap {
            entries: FxHashMap::default(),
        }
    }
}

impl<K: PartialEq, V: Clone> SpecMap<K, V> {
    /// The value of a spec.
    pub fn get(&self, spec: &Spec, key: &K) -> Option<V> {
        let alike = self.entries.get(&hash(spec))?;
        let found = alike
            .iter()
            .find(|(known, of, _)| of == key && is_same(known, spec));
        found.map(|(.., value)| value.clone())
    }

    /// Adds a value for a spec that has none.
    pub fn insert(&mut self, spec: &Spec, key: K, value: V) {
        let alike = self.entries.entry(hash(spec)).or_default();
        alike.push((spec.clone(), key, value));
    }
}

/// The kernels that one compilation has prepared, so that programs it compares share them.
///
/// All targets of a compilation are one device; they differ in the workspaces that they allow.
#[derive(Default)]
pub struct KernelCache {
    /// `None` if the spec cannot run on part of the batch.
    known: RefCell<SpecMap<Variant, Option<Arc<Kernel>>>>,
}

/// The properties of a kernel besides its spec.
#[derive(Clone, Debug, PartialEq)]
struct Variant {
    bounds: Env,
    /// The most bytes of its workspace.
    workspace_max: u64,
    guarded: bool,
    choice: Choice,
    /// For part of the batch: its symbol, and the most examples.
    slice: Option<(Symbol, u32)>,
}

impl KernelCache {
    /// The kernel for a spec, as from [`Kernel::new`].
    pub(crate) fn prepare(
        &self,
        spec: &Spec,
        bounds: &Env,
        target: &Target,
        guarded: bool,
        choice: Choice,
    ) -> Result<Arc<Kernel>, SpecError> {
        let variant = Variant {
            bounds: *bounds,
            workspace_max: target.workspace_max(),
            guarded,
            choice,
            slice: None,
        };
        let known = self.known.borrow().get(spec, &variant);
        if let Some(Some(kernel)) = known {
            return Ok(kernel);
        }
        let kernel = Kernel::new(spec.clone(), bounds, target, guarded, &variant.choice)?;
        let kernel = Arc::new(kernel);
        let mut known = self.known.borrow_mut();
        known.insert(spec, variant, Some(kernel.clone()));
        Ok(kernel)
    }

    /// The kernel for parts of the batch, as from [`Kernel::sliced`].
    pub(crate) fn sliced(
        &self,
        spec: &Spec,
        batch: Symbol,
        examples: u32,
        bounds: &Env,
        target: &Target,
    ) -> Result<Option<Arc<Kernel>>, SpecError> {
        let variant = Variant {
            bounds: *bounds,
            workspace_max: target.workspace_max(),
            guarded: false,
            choice: Choice::default(),
            slice: Some((batch, examples)),
        };
        let known = self.known.borrow().get(spec, &variant);
        if let Some(kernel) = known {
            return Ok(kernel);
        }
        let kernel = Kernel::sliced(spec.clone(), batch, examples, bounds, target)?.map(Arc::new);
        let mut known = self.known.borrow_mut();
        known.insert(spec, variant, kernel.clone());
        Ok(kernel)
    }
}

fn hash(spec: &Spec) -> u64 {
    let mut hasher = FxHasher::default();
    (&spec.dims, spec.reduced, &spec.operands, &spec.stores).hash(&mut hasher);
    (&spec.indices, spec.code.len()).hash(&mut hasher);
    hasher.finish()
}

/// Whether two specs are the same to the bit: `==` takes 0 for −0.
fn is_same(a: &Spec, b: &Spec) -> bool {
    let constants = |(a, b): (&Inst, &Inst)| match (a, b) {
        (Inst::Const(a), Inst::Const(b)) => a.bits() == b.bits(),
        _ => true,
    };
    let prologues = match (&a.body, &b.body) {
        (Body::Conv2d(a), Body::Conv2d(b)) => match (&a.prologue, &b.prologue) {
            (Some(a), Some(b)) => is_same(a, b),
            _ => true,
        },
        (Body::Scan(a), Body::Scan(b)) => {
            let calls = a.calls.iter().zip(&b.calls);
            calls.into_iter().all(|(a, b)| is_same(&a.spec, &b.spec))
        }
        _ => true,
    };
    a == b && prologues && a.code.iter().zip(&b.code).all(constants)
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::scalar::Value;
    use slabwise_kernels::spec::{Body, Inst, Spec};

    use super::is_same;

    #[test]
    fn constants_differ_by_their_sign() {
        let of = |x: f32| Spec {
            body: Body::Loop,
            dims: [].into_iter().collect(),
            reduced: 0,
            operands: Vec::new(),
            indices: Vec::new(),
            code: vec![Inst::Const(Value::F32(x))],
            stores: Vec::new(),
        };
        assert!(is_same(&of(0.0), &of(0.0)));
        assert!(of(0.0) == of(-0.0) && !is_same(&of(0.0), &of(-0.0)));
    }
}
