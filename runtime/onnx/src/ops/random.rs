//! Operators of random.

use super::Run;

pub const OPERATORS: &[(&str, Run)] = &[];
