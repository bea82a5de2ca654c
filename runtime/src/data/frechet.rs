//! The distance of two sets of features, by which generated images are judged.

use ndarray::{Array2, ArrayView2, Axis, Slice};

use crate::error::{Error, Result};

/// The Fréchet distance of normal distributions with the means and covariances of two sets of
/// features, one example in a row: |μ₁ − μ₂|² + tr(Σ₁ + Σ₂ − 2 (Σ₁Σ₂)^½), with covariances over
/// n − 1. Of the features of an Inception network it is the FID (Heusel et al. 2017).
///
/// The work grows with the cube of the number of features.
///
/// ```
/// # use slabwise::data::frechet_distance;
/// use ndarray::arr2;
/// let (found, wanted) = (arr2(&[[0.0, 1.0], [2.0, 5.0]]), arr2(&[[3.0, 1.0], [5.0, 5.0]]));
/// assert!((frechet_distance(found.view(), wanted.view())? - 9.0).abs() < 1e-6);
/// # Ok::<(), slabwise::Error>(())
/// ```
///
/// # Errors
/// Fewer than two examples in a set, different numbers of features, or features that are not finite.
pub fn frechet_distance(a: ArrayView2<'_, f32>, b: ArrayView2<'_, f32>) -> Result<f64> {
    for (name, set) in [("first", &a), ("second", &b)] {
        if set.nrows() < 2 || !set.iter().all(|x| x.is_finite()) {
            return Err(Error::Value(format!(
                "frechet_distance: the {name} set has {} examples; at least two of finite features \
                 are needed",
                set.nrows()
            )));
        }
    }
    if a.ncols() != b.ncols() {
        return Err(Error::Value(format!(
            "frechet_distance: {} features and {}",
            a.ncols(),
            b.ncols()
        )));
    }
    let [(mean_a, of_a), (mean_b, of_b)] = [a, b].map(moments);
    let apart: f64 = (&mean_a - &mean_b).iter().map(|d| d * d).sum();
    let trace = |m: &Array2<f64>| m.diag().sum();
    // With Σ₁ = RᵀR, Σ₁Σ₂ has the eigenvalues of the symmetric RΣ₂Rᵀ, and zeros.
    let rows = factor(&of_a);
    let joint = eigenvalues(rows.dot(&of_b).dot(&rows.t()));
    let joint: f64 = joint.iter().map(|value| value.max(0.0).sqrt()).sum();
    Ok((apart + trace(&of_a) + trace(&of_b) - 2.0 * joint).max(0.0))
}

/// Means and covariances of the columns.
fn moments(set: ArrayView2<'_, f32>) -> (ndarray::Array1<f64>, Array2<f64>) {
    let set = set.mapv(f64::from);
    let mean = set.sum_axis(Axis(0)) / set.nrows() as f64;
    let rest = set - &mean;
    let covariance = rest.t().dot(&rest) / (rest.nrows() - 1) as f64;
    (mean, covariance)
}

/// Rows R of a covariance RᵀR, the largest remainder first (Cholesky's factors with pivots). There are
/// as many as its rank, as far as rounding tells.
fn factor(m: &Array2<f64>) -> Array2<f64> {
    let n = m.nrows();
    let mut rows = Array2::zeros((n, n));
    let mut rest = m.diag().to_owned();
    let least = f64::EPSILON * rest.iter().fold(0.0, |most: f64, &x| most.max(x));
    for k in 0..n {
        let (at, &most) = (rest.iter().enumerate())
            .max_by(|(_, a), (_, b)| a.total_cmp(b))
            .expect("there are rows left");
        if most <= least {
            rows.slice_axis_inplace(Axis(0), Slice::from(..k));
            return rows;
        }
        let before = rows.slice_axis(Axis(0), Slice::from(..k));
        let row = (&m.row(at) - &before.t().dot(&before.column(at))) / most.sqrt();
        rest.zip_mut_with(&row, |rest, x| *rest -= x * x);
        rest[at] = 0.0;
        rows.row_mut(k).assign(&row);
    }
    rows
}

/// Diagonal and squares of the elements beside it of a matrix with the eigenvalues of a symmetric one
/// (Householder 1958).
fn tridiagonal(mut m: Array2<f64>) -> (Vec<f64>, Vec<f64>) {
    let n = m.nrows();
    let mut beside = Vec::new();
    for k in 1..n {
        let rest = Slice::from(k..);
        let mut v = m.column(k - 1).slice_axis(Axis(0), rest).to_owned();
        let length = v.dot(&v).sqrt();
        beside.push(length * length);
        v[0] += length.copysign(v[0]);
        let square = v.dot(&v);
        if square == 0.0 {
            continue;
        }
        let mut part = m.slice_axis_mut(Axis(0), rest);
        part.slice_axis_inplace(Axis(1), rest);
        let p = part.dot(&v) * (2.0 / square);
        let w = &p - &(&v * (p.dot(&v) / square));
        for (mut row, (&v_i, &w_i)) in part.rows_mut().into_iter().zip(v.iter().zip(&w)) {
            row.scaled_add(-v_i, &w);
            row.scaled_add(-w_i, &v);
        }
    }
    (m.diag().to_vec(), beside)
}

/// The eigenvalues of a symmetric matrix, ascending, each by bisection between bounds of all (Barth,
/// Martin & Wilkinson 1967).
fn eigenvalues(m: Array2<f64>) -> Vec<f64> {
    let (diagonal, beside) = tridiagonal(m);
    let n = diagonal.len();
    let reach = |k: usize| beside.get(k).map_or(0.0, |square| square.sqrt());
    let most = (0..n).fold(0.0, |most: f64, k| {
        most.max(diagonal[k].abs() + reach(k) + k.checked_sub(1).map_or(0.0, reach))
    });
    // The number of eigenvalues below x: of negative pivots of an elimination.
    let below = |x: f64| {
        let mut pivot = 1.0;
        let negative = (0..n).filter(|&k| {
            let square = k.checked_sub(1).map_or(0.0, |k| beside[k]);
            pivot = diagonal[k] - x - square / pivot;
            if pivot == 0.0 {
                pivot = f64::EPSILON * most.max(f64::MIN_POSITIVE);
            }
            pivot < 0.0
        });
        negative.count()
    };
    let value = |k: usize| {
        let (mut low, mut high) = (-most, most);
        while high - low > 2.0 * f64::EPSILON * most {
            let middle = low + (high - low) / 2.0;
            if middle <= low || middle >= high {
                break;
            }
            match below(middle) > k {
                true => high = middle,
                false => low = middle,
            }
        }
        low + (high - low) / 2.0
    };
    (0..n).map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Features without a pattern, other ones for each factor.
    fn features(
        rows: usize,
        factors: [usize; 3],
        modulus: usize,
        by: f32,
        less: f32,
    ) -> Array2<f32> {
        let [i, j, both] = factors;
        Array2::from_shape_fn((rows, 4), |(row, column)| {
            ((row * i + column * j + row * column * both) % modulus) as f32 / by - less
        })
    }

    /// Eigenvalues of a rotated diagonal, two of which are equal and one 0.
    #[test]
    fn eigenvalues_are_those_of_the_diagonal() {
        let wanted = [-2.5, 0.0, 1.0, 1.0, 4.0, 1e6];
        let mut m = Array2::from_diag(&ndarray::arr1(&wanted));
        for k in 0..30 {
            let (p, q) = (k % 6, (k * k + 1) % 6);
            if p == q {
                continue;
            }
            let (sin, cos) = (k as f64 + 0.3).sin_cos();
            let mut turn = Array2::eye(6);
            (turn[[p, p]], turn[[q, q]]) = (cos, cos);
            (turn[[p, q]], turn[[q, p]]) = (sin, -sin);
            m = turn.dot(&m).dot(&turn.t());
        }
        for (found, wanted) in eigenvalues(m.clone()).into_iter().zip(wanted) {
            assert!((found - wanted).abs() < 1e-8, "{found}, not {wanted}");
        }
        assert!(eigenvalues(Array2::zeros((3, 3))).iter().all(|&x| x == 0.0));
        let square = m.dot(&m);
        let rows = factor(&square);
        assert_eq!(rows.dim(), (5, 6));
        assert!(
            (rows.t().dot(&rows) - square)
                .iter()
                .all(|x| x.abs() < 1e-2)
        );
    }

    /// The numbers are NumPy's, with the eigenvalues of the product of the covariances.
    #[test]
    fn distances_are_those_of_normal_distributions() {
        let a = features(7, [37, 11, 5], 17, 4.0, 0.0);
        let b = features(7, [23, 7, 3], 19, 5.0, 1.0);
        let near = |found: Result<f64>, exact: f64| {
            let found = found.expect("they fit");
            assert!((found - exact).abs() < 1e-6, "{found}, not {exact}");
        };
        near(frechet_distance(a.view(), b.view()), 4.289_457_602_553_409);
        near(frechet_distance(b.view(), a.view()), 4.289_457_602_553_409);
        near(frechet_distance(a.view(), a.view()), 0.0);
        // Covariances without full rank.
        let three = Slice::from(..3);
        let few = |x: &Array2<f32>| x.slice_axis(Axis(0), three).to_owned();
        near(
            frechet_distance(few(&a).view(), few(&b).view()),
            10.555_681_746_898_825,
        );
    }

    #[test]
    fn sets_that_have_no_covariance_are_refused() {
        let a = features(3, [1, 2, 3], 5, 1.0, 0.0);
        let narrow = a.slice_axis(Axis(1), Slice::from(..3));
        let one = a.slice_axis(Axis(0), Slice::from(..1));
        let mut infinite = a.clone();
        infinite[[1, 1]] = f32::INFINITY;
        for (b, part) in [
            (narrow, "4 features and 3"),
            (one, "1 examples"),
            (infinite.view(), "finite"),
        ] {
            let error = frechet_distance(a.view(), b)
                .expect_err("refused")
                .to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
