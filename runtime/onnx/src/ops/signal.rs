//! Operators of signal.

use super::Run;

pub const OPERATORS: &[(&str, Run)] = &[];
