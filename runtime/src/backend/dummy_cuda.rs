//! The CUDA back end of a build without the feature `cuda`: no device opens, and its types have no
//! values.

use slabwise_kernels::cpu::SpecError;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::Spec;

use super::{Backend, Capabilities, Resources};
use crate::device::Device;
use crate::error::{Error, Result};

/// The kernel chosen for a spec, of which there is no choice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {}

#[derive(Clone, Debug)]
pub enum Target {}

pub enum Kernel {}

pub(crate) enum Loaded {}

pub(super) fn open(ordinal: u32) -> Result<Box<dyn Backend>> {
    Device::Cuda(ordinal).check()?;
    Err(Error::Internal("this build has no CUDA".into()))
}

impl Target {
    pub(super) fn capabilities(&self) -> Capabilities {
        match *self {}
    }

    pub(super) fn prepare(
        &self,
        _: Spec,
        _: &Env,
        _: bool,
        _: &Choice,
    ) -> Result<Kernel, SpecError> {
        match *self {}
    }

    pub(super) fn choose(&self, _: &[(&Spec, bool)], _: &Env) -> Vec<Choice> {
        match *self {}
    }

    pub(super) fn sums_alike(&self, _: &Spec, _: &Spec, _: &Env) -> Option<bool> {
        match *self {}
    }

    pub(super) fn with_tf32(self, _: bool) -> Target {
        match self {}
    }

    pub(super) fn timed_from(self, _: Option<i64>) -> Target {
        match self {}
    }
}

impl Kernel {
    pub(super) fn spec(&self) -> &Spec {
        match *self {}
    }

    pub(super) fn workspace(&self) -> u64 {
        match *self {}
    }

    pub(super) fn library(&self) -> Option<String> {
        match *self {}
    }
}

impl Loaded {
    pub fn check_input(&self, _: usize, _: DType, _: &[u8], _: &Env) -> Result<()> {
        match *self {}
    }

    pub fn resources(&self, _: &super::Kernel) -> Vec<Resources> {
        match *self {}
    }
}
