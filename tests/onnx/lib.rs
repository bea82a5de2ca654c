//! Tests of ONNX models on recorded cases.
