//! The operators: a function for each, in the file of its family, and a row in that file's table.

mod activation;
mod attention;
mod contributed;
mod elementwise;
mod image;
mod index;
mod loss;
mod norm;
mod product;
mod quantized;
mod random;
mod recurrent;
mod reduce;
mod refused;
mod scatter;
mod sequence;
mod shape;
mod signal;

use crate::call::{Call, Results};

pub use recurrent::UNROLLED_MAX;

/// The implementation of an operator.
pub type Run = for<'c, 't> fn(&Call<'c, 't>) -> Results<'t>;

/// The operators of the default domain, by family.
const TABLES: &[&[(&str, Run)]] = &[
    activation::OPERATORS,
    attention::OPERATORS,
    elementwise::OPERATORS,
    image::OPERATORS,
    index::OPERATORS,
    loss::OPERATORS,
    norm::OPERATORS,
    product::OPERATORS,
    quantized::OPERATORS,
    random::OPERATORS,
    recurrent::OPERATORS,
    reduce::OPERATORS,
    refused::OPERATORS,
    scatter::OPERATORS,
    sequence::OPERATORS,
    shape::OPERATORS,
    signal::OPERATORS,
];

/// The implementation of an operator of a domain.
pub fn find(domain: &str, name: &str) -> Option<Run> {
    let rows = match domain {
        "" => TABLES,
        "com.microsoft" => contributed::TABLES,
        _ => return None,
    };
    let mut rows = rows.iter().copied().flatten();
    rows.find(|(known, _)| *known == name).map(|(_, run)| *run)
}
