//! Operators that are known and cannot be expressed, with reasons that say what would help.

use super::Run;

macro_rules! refused {
    ($($reason:literal: $($name:literal),+;)+) => {
        pub const OPERATORS: &[(&str, Run)] = &[$($(($name, |_| Err($reason.into())),)+)+];
    };
}

refused! {
    "strings are not computed; prepare the text outside of the model":
        "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer";
    "sequences are mapped by their parts only; write the body out for each element":
        "SequenceMap";
    "images are not decoded; decode them outside of the model": "ImageDecoder";
    "this operator is not expressed yet": "BitCast", "DeformConv", "Det", "MaxRoiPool", "RoiAlign";
}
