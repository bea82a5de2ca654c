//! Operators of recurrent.

use super::Run;

pub const OPERATORS: &[(&str, Run)] = &[];
