//! The CUDA back end of a build without the feature `cuda`: no device opens, and its types have no
//! values.

use slabwise_kernels::cpu::SpecError;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Quantization, Scores, Spec};

use super::{Backend, Capabilities, Resources, Sectors};
use crate::device::Device;
use crate::error::{Error, Result};

/// The kernel chosen for a spec, of which there is no choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Choice {}

#[derive(Clone, Debug)]
pub enum Target {}

pub enum Kernel {}

/// A program on a device, of which there is none.
pub enum Loaded {}

pub(super) fn open(ordinal: u32) -> Result<Box<dyn Backend>> {
    Device::Cuda(ordinal).check()?;
    Err(Error::Internal("this build has no CUDA".into()))
}

/// Fails, because no CUDA device can be used.
pub(crate) fn usable(_ordinal: u32) -> Result<(), String> {
    Err("this build has no CUDA; build it with the feature \"cuda\", or use cpu or auto".into())
}

/// As of a build with CUDA.
pub(crate) fn survey() -> Vec<(String, String)> {
    vec![(
        "CUDA".into(),
        "not in this build; the feature \"cuda\" adds it".into(),
    )]
}

impl Target {
    pub(super) fn capabilities(&self) -> Capabilities {
        match *self {}
    }

    pub(super) fn has_attention(&self, _: &Scores, _: &[(DType, Size)]) -> bool {
        match *self {}
    }

    pub(super) fn has_quantized_matmul(&self, _: Quantization, _: i64) -> bool {
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

    pub(super) fn has_same_sums(&self, _: &Spec, _: &Spec, _: &Env) -> Option<bool> {
        match *self {}
    }

    pub(super) fn sectors(&self) -> Option<Sectors> {
        match *self {}
    }

    pub(super) fn cycles(&self, _: &Spec, _: &Env) -> Option<f64> {
        match *self {}
    }

    pub(super) fn has_kernel(&self, _: &Spec, _: &Env) -> bool {
        match *self {}
    }

    pub(super) fn cycles_saved(&self, _: &Spec, _: &Spec, _: &Env) -> Option<f64> {
        match *self {}
    }

    pub(super) fn set_tf32(&mut self, _: bool) {
        match *self {}
    }

    pub(super) fn time_from(&mut self, _: Option<i64>) {
        match *self {}
    }
}

impl Kernel {
    pub(super) fn sources(&self) -> Vec<(&str, &str)> {
        match *self {}
    }

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
    /// As of a build with CUDA.
    pub fn check_input(&self, _: usize, _: DType, _: &[u8], _: &Env) -> Result<()> {
        match *self {}
    }

    /// As of a build with CUDA.
    pub fn resources(&self, _: &super::Kernel) -> Vec<Resources> {
        match *self {}
    }
}
