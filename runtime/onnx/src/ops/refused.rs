//! Operators that are known and cannot be expressed, with reasons that say what would help.

use super::Run;

macro_rules! refused {
    ($($reason:literal: $($name:literal),+;)+) => {
        pub const OPERATORS: &[(&str, Run)] = &[$($(($name, |_| Err($reason.into())),)+)+];
    };
}

refused! {
    "quantized models are not run; export the model in float, or remove its QuantizeLinear and DequantizeLinear pairs":
        "ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv",
        "QLinearMatMul", "QuantizeLinear";
    "strings are not computed; prepare the text outside of the model":
        "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer";
    "sequences of tensors are not values of a program; concatenate them into one tensor":
        "ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
        "SequenceInsert", "SequenceLength", "SequenceMap", "SplitToSequence";
    "optional values are not values of a program; export the model with the value or without":
        "Optional", "OptionalGetElement", "OptionalHasElement";
    "images are not decoded; decode them outside of the model": "ImageDecoder";
}
