//! Weights and states of a program.

use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{Dims, Quantization};

use crate::init::Init;

/// A weight or a state of a program, by name.
#[derive(Clone, Debug)]
pub struct VariableInfo {
    /// Its name, which is its key in a weight file.
    pub name: Arc<str>,
    /// Its type.
    pub dtype: DType,
    /// Its shape; all lengths are fixed.
    pub dims: Dims,
    /// Its initial value.
    pub init: Init,
    /// Part of the model (a weight, a running statistic), rather than state that accompanies
    /// weights.
    pub is_param: bool,
    /// Whether training changes it, if it is a part of the model.
    pub trained: bool,
    /// The variable of which this is an average: it starts with that variable's value.
    pub average_of: Option<Arc<str>>,
    /// The weight whose rounding error this is: it ends when that weight is replaced.
    pub remainder_of: Option<Arc<str>>,
    /// The shape of the whole variable, if each rank holds an equal part. The part is one row.
    pub whole: Option<Dims>,
    /// The quantized weight that this is a part of.
    pub part: Option<QuantizedPart>,
    /// The bytes of a constant, which are fixed and not part of a checkpoint.
    pub data: Option<Arc<Vec<u8>>>,
}

/// A part of a quantized weight, which is a variable of its own.
#[derive(Clone, Debug)]
pub struct QuantizedPart {
    /// The name of the weight.
    pub weight: Arc<str>,
    /// The shape of the weight: rows, and numbers of a row.
    pub dims: [usize; 2],
    /// The initial value of the weight.
    pub init: Init,
    /// How it is quantized.
    pub format: Quantization,
    /// Which part.
    pub role: QuantizedRole,
}

/// The parts of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizedRole {
    /// The packed numbers.
    Numbers,
    /// The scales of blocks.
    Scales,
    /// The packed zero points of blocks.
    Zeros,
}

impl VariableInfo {
    /// The state that averages this variable over the steps, of type f32: a step moves it by too
    /// little for halves.
    pub fn average(&self) -> Self {
        let name = format!("ema.{}", self.name).into();
        VariableInfo {
            name,
            dtype: DType::F32,
            is_param: false,
            trained: false,
            average_of: Some(self.name.clone()),
            ..self.clone()
        }
    }

    /// Whether it is a constant.
    pub fn is_constant(&self) -> bool {
        self.data.is_some()
    }

    /// The number of axes.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }
}

/// A step counter, and the variables that the optimizers reading it update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// The counter.
    pub variable: u32,
    /// The variables whose updates it counts.
    pub counts: Vec<u32>,
}
