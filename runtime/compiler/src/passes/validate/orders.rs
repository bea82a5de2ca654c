//! The orders in which kernels sum.

use slabwise_kernels::spec::{Inst, Spec};

/// Whether two kernels over one space sum in the same order.
pub(super) type Alike<'a> = &'a dyn Fn(&Spec, &Spec) -> bool;

/// The known orders of sums.
pub(super) struct Orders<'a> {
    /// For each a kernel that sums in it.
    known: Vec<Spec>,
    /// `None` if orders do not matter.
    alike: Option<Alike<'a>>,
}

impl<'a> Orders<'a> {
    pub fn new(alike: Option<Alike<'a>>) -> Self {
        Orders {
            known: Vec::new(),
            alike,
        }
    }

    /// The number of the order in which a kernel sums, from 1 on; 0 for one without sums.
    pub fn of(&mut self, spec: &Spec) -> u32 {
        if !spec.code.iter().any(Inst::is_reduce) {
            return 0;
        }
        let Some(alike) = self.alike else {
            return 1;
        };
        let same = |known: &Spec| {
            let same_space = (&known.dims, known.reduced) == (&spec.dims, spec.reduced);
            same_space && (known == spec || alike(known, spec))
        };
        let known = self.known.iter().position(same);
        let at = known.unwrap_or_else(|| {
            self.known.push(spec.clone());
            self.known.len() - 1
        });
        at as u32 + 1
    }
}
