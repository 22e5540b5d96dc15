//! Tables of text.

/// Lines of cells below a head, in columns as wide as their widest cell. Cells that begin with a digit stand
/// on the right.
pub(crate) fn render(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(head.get(column).map(|cell| cell.chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let cells: Vec<String> = cells
            .zip(&widths)
            .map(|(cell, &width)| match cell.starts_with(|c: char| c.is_ascii_digit()) {
                true => format!("{cell:>width$}"),
                false => format!("{cell:<width$}"),
            })
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    };
    line(&mut head.iter().copied());
    let rules: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
    line(&mut rules.iter().map(String::as_str));
    for row in rows {
        line(&mut row.iter().map(String::as_str));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_numbers_stand_on_the_right() {
        let rows = [vec!["a".to_owned(), "1.5".to_owned()], vec!["longer".to_owned(), "10.5".to_owned()]];
        let text = render(&["name", "GB/s"], &rows);
        assert_eq!(text, "name    GB/s\n------  ----\na        1.5\nlonger  10.5\n");
        assert_eq!(render(&["x"], &[]), "x\n-\n");
    }
}
