//! Operators of loss.

use super::Run;

pub const OPERATORS: &[(&str, Run)] = &[];
