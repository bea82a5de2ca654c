//! Operators that draw random numbers, which are refused: another generator's cannot be repeated.

use super::Run;
use crate::call::{Call, Results};

pub const OPERATORS: &[(&str, Run)] = &[
    ("Bernoulli", refuse),
    ("Multinomial", refuse),
    ("RandomNormal", refuse),
    ("RandomNormalLike", refuse),
    ("RandomUniform", refuse),
    ("RandomUniformLike", refuse),
];

fn refuse<'t>(_: &Call<'_, 't>) -> Results<'t> {
    Err("it draws random numbers, which the generator of another runtime cannot repeat".into())
}
