//! Pooling layers.

use super::Module;
use crate::tensor::{PoolOptions, Tensor};

macro_rules! adaptive {
    ($($(#[$doc:meta])* $name:ident($size:ty) $method:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name(pub $size);

        impl Module for $name {
            #[track_caller]
            fn forward<'t>(&self, x: Tensor<'t>) -> Tensor<'t> {
                x.$method(self.0)
            }
        }
    )*};
}

adaptive! {
    /// Means of windows that divide the image into a number of rows and columns; see
    /// [`Tensor::adaptive_avg_pool2d`].
    AdaptiveAvgPool2d([usize; 2]) adaptive_avg_pool2d;
    /// See [`Tensor::adaptive_max_pool2d`].
    AdaptiveMaxPool2d([usize; 2]) adaptive_max_pool2d;
    /// See [`Tensor::adaptive_avg_pool1d`].
    AdaptiveAvgPool1d(usize) adaptive_avg_pool1d;
    /// See [`Tensor::adaptive_max_pool1d`].
    AdaptiveMaxPool1d(usize) adaptive_max_pool1d;
    /// Windows of the given size, side by side; see [`Tensor::max_pool2d`]. Other windows:
    /// [`MaxPool2dWith`].
    MaxPool2d(usize) max_pool2d;
    /// Windows of the given size, side by side; see [`Tensor::avg_pool2d`]. Other windows:
    /// [`AvgPool2dWith`].
    AvgPool2d(usize) avg_pool2d;
    /// The largest element of each window of an image; see [`Tensor::max_pool2d_with`].
    MaxPool2dWith(PoolOptions<2>) max_pool2d_with;
    /// The mean of each window of an image; see [`Tensor::avg_pool2d_with`].
    AvgPool2dWith(PoolOptions<2>) avg_pool2d_with;
    /// The largest element of each window of a sequence; see [`Tensor::max_pool1d_with`].
    MaxPool1d(PoolOptions<1>) max_pool1d_with;
    /// The mean of each window of a sequence; see [`Tensor::avg_pool1d_with`].
    AvgPool1d(PoolOptions<1>) avg_pool1d_with;
}
