//! Operators of attention.

use super::Run;

pub const OPERATORS: &[(&str, Run)] = &[];
