"""The store of a fleet: the same tables in PostgreSQL, through SQLAlchemy Core.

Needs the extra `layerzero[fleet]`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..spec.errors import DataError
from .interface import COLUMNS, KEY, NewerStore, Store, StoreError, environment_id, normalized
from .record import EAGER, QUIET_SPREAD, TEXTS, Measurement, PerfView, Rates

VERSION = 2
DRIVERS = ("psycopg", "pg8000", "psycopg2")    # the first that is installed
BATCH = 500
_LOCK = 0x4C5A5046                             # serializes processes that create the tables


class FleetStore(Store):
    """A server that many machines read and write. `url` is
    postgresql://user:password@host/database.

    Missing tables are created; with `read_only` nothing is created or written.
    """

    def __init__(self, url: str, timeout: float = 10.0, read_only: bool = False) -> None:
        self.read_only = read_only
        self._missing = False                  # read only, and there are no tables yet
        try:
            self._sa: Any = importlib.import_module("sqlalchemy")
            self._dialect: Any = importlib.import_module("sqlalchemy.dialects.postgresql")
        except ImportError as e:
            raise StoreError("perfdb is a PostgreSQL server, which needs SQLAlchemy; "
                             "run: pip install 'layerzero[fleet]'") from e
        try:
            address = self._sa.make_url(url)
        except (self._sa.exc.ArgumentError, ValueError) as e:
            raise StoreError(
                "perfdb: wanted postgresql://user:password@host:port/database, got an address that "
                "cannot be read") from e
        if "+" not in address.drivername:
            address = address.set(drivername=f"postgresql+{_driver()}")
        self.name = address.render_as_string(hide_password=True)
        self._tables()
        connect_args = {"timeout" if address.drivername.endswith("pg8000")
                        else "connect_timeout": max(1, int(timeout))}
        with self._store_errors():
            self._engine = self._sa.create_engine(address, poolclass=self._sa.pool.StaticPool,
                                                  connect_args=connect_args)
            try:
                self._prepare()
            except BaseException:              # re-raised: only the connection is closed
                self._engine.dispose()
                raise

    def _tables(self) -> None:
        sa = self._sa
        self._meta = sa.MetaData()
        kinds = {name: sa.Text if name in TEXTS else sa.BigInteger if name == "samples"
                 else sa.Double
                 for name in COLUMNS}
        self._measurements = sa.Table("layerzero_measurements", self._meta, *(
            sa.Column(name, kind, nullable=False, primary_key=name in KEY)
            for name, kind in kinds.items()))
        self._environments = sa.Table(
            "layerzero_environments", self._meta, sa.Column("id", sa.Text, primary_key=True),
            sa.Column("data", sa.JSON, nullable=False))
        self._rates = sa.Table("layerzero_rates", self._meta,
                               sa.Column("place", sa.Text, primary_key=True), *(
            sa.Column(name, sa.Double, nullable=False)
            for name in ("flops_per_us", "bytes_per_us", "at")))
        self._schema = sa.Table("layerzero_schema", self._meta,
                                sa.Column("version", sa.Integer, primary_key=True,
                                          autoincrement=False))

    def _prepare(self) -> None:
        sa = self._sa
        if self.read_only:
            self._engine = self._engine.execution_options(postgresql_readonly=True)
            with self._engine.connect() as connection:
                self._missing = not sa.inspect(connection).has_table(self._schema.name)
                version = 0 if self._missing else self._version(connection)
            if 0 < version < VERSION:
                raise StoreError(f"{self.name} has schema {version}, wanted is schema {VERSION}; "
                                 "whoever writes next brings it up to date, such as lz perf prune")
            return
        with self._engine.begin() as connection:
            connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({_LOCK})"))      # others wait
            self._schema.create(connection, checkfirst=True)
            version = self._version(connection)
            if version < 1:
                self._meta.create_all(connection)
            elif version < 2:
                self._add_mode(connection)
            if version < VERSION:
                connection.execute(self._schema.insert().values(version=VERSION))

    def _version(self, connection: Any) -> int:
        sa = self._sa
        newest = sa.select(sa.func.max(self._schema.c.version))
        version = int(connection.execute(newest).scalar() or 0)
        if version > VERSION:
            raise NewerStore(f"{self.name} has schema {version}; this release knows schemas up to "
                             f"{VERSION}. Nothing of it was touched: upgrade layerzero, or set "
                             "perfdb to another database")
        return version

    def _add_mode(self, connection: Any) -> None:
        """Adds the column `mode`. As in `_migrate_eager_rows` of schema.py, rows of a CPU were
        eager, those of others are of an unknown mode."""
        for statement in (
                "DELETE FROM layerzero_measurements WHERE place !~ '-[0-9]+t$'",
                "ALTER TABLE layerzero_measurements ADD COLUMN mode TEXT NOT NULL DEFAULT "
                f"'{EAGER}'",
                "ALTER TABLE layerzero_measurements DROP CONSTRAINT layerzero_measurements_pkey",
                f"ALTER TABLE layerzero_measurements ADD PRIMARY KEY ({', '.join(KEY)})"):
            connection.execute(self._sa.text(statement))

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except (self._sa.exc.SQLAlchemyError, OSError, UnicodeError) as e:
            lines = str(getattr(e, "orig", None) or e).strip().splitlines()
            text = lines[0] if lines else type(e).__name__
            raise StoreError(
                f"{self.name}: {text}; measurements cannot be read or kept there now") from e

    def write(self, rows: Iterable[Measurement], environments: Mapping[str, Mapping[str, Any]],
              rates: Mapping[str, tuple[Rates, float]]) -> None:
        if self.read_only:
            raise StoreError(f"{self.name} was opened to be read; nothing was written")
        now = time.time()
        # A statement must not touch a row twice, and all writers must lock rows in the same order.
        best: dict[tuple[str, ...], Measurement] = {}
        for m in normalized(rows):
            key = tuple(getattr(m, name) for name in KEY)
            if key not in best or m.supersedes(best[key]):
                best[key] = m
        insert, c = self._dialect.insert, self._measurements.c
        upsert = insert(self._measurements)
        new = upsert.excluded
        upsert = upsert.on_conflict_do_update(
            index_elements=KEY, set_={name: new[name] for name in COLUMNS if name not in KEY},
            where=self._sa.tuple_(new.spread <= QUIET_SPREAD, new.at)
            >= self._sa.tuple_(c.spread <= QUIET_SPREAD, self._known_time(c.at, now)))
        upsert_rates = insert(self._rates)
        upsert_rates = upsert_rates.on_conflict_do_update(
            index_elements=("place",),
            where=upsert_rates.excluded.at >= self._known_time(self._rates.c.at, now),
            set_={name: upsert_rates.excluded[name]
                  for name in ("flops_per_us", "bytes_per_us", "at")})
        with self._store_errors(), self._engine.begin() as connection:
            for i in sorted(environments):
                connection.execute(insert(self._environments).on_conflict_do_nothing(),
                                   {"id": i, "data": dict(environments[i])})
            for batch in _batches([best[key]._asdict() for key in sorted(best)]):
                connection.execute(upsert, batch)
            for place, (rate, at) in sorted(rates.items()):
                connection.execute(upsert_rates,
                                   {"place": place, "flops_per_us": float(rate.flops_per_us),
                                                  "bytes_per_us": float(rate.bytes_per_us),
                                                  "at": min(float(at), now)})

    def _known_time(self, at: Any, now: float) -> Any:
        """Returns the time, 0 for one in the future: see `normalized`."""
        return self._sa.case((at > now, 0.0), else_=at)

    def _select(self, *conditions: Any) -> Any:
        return self._sa.select(*(self._measurements.c[name] for name in COLUMNS)).where(*conditions)

    def _checked_row(self, values: Sequence[Any]) -> Measurement:
        try:
            return Measurement._make(values).checked()
        except DataError as e:
            raise StoreError(f"{self.name}: a row is not a measurement: {e}") from e

    def get(self, kernel: str, bucket: str, place: str, build: str | None = None,
            mode: str = EAGER) -> Measurement | None:
        c = self._measurements.c
        conditions = [c.kernel == kernel, c.bucket == bucket, c.place == place, c.mode == mode]
        conditions += [c.build == build] if build is not None else []
        if self._missing:
            return None
        with self._store_errors(), self._engine.connect() as connection:
            row = connection.execute(self._select(*conditions).order_by(c.at.desc()).limit(
                1)).first()
        return None if row is None else self._checked_row(row)

    def _rows(self) -> Iterator[Measurement]:
        if self._missing:
            return
        with self._store_errors(), self._engine.connect() as connection:
            rows = connection.execute(self._select()).all()
        yield from map(self._checked_row, rows)

    def environments(self) -> dict[str, dict[str, Any]]:
        if self._missing:
            return {}
        table = self._environments
        with self._store_errors(), self._engine.connect() as connection:
            rows = connection.execute(self._sa.select(table.c.id, table.c.data)).all()
        return {i: data for i, data in rows if isinstance(data, dict) and environment_id(data) == i}

    def timed_rates(self) -> dict[str, tuple[Rates, float]]:
        if self._missing:
            return {}
        columns = [self._rates.c[name] for name in ("place", "flops_per_us", "bytes_per_us", "at")]
        with self._store_errors(), self._engine.connect() as connection:
            rows = connection.execute(self._sa.select(*columns)).all()
        return {place: (Rates(flops, moved), at) for place, flops, moved, at in rows
                if 0 < flops < math.inf and 0 < moved < math.inf}

    def view(self, builds: Mapping[str, str], since: float = 0.0,
             on_damage: Callable[[str], None] = lambda what: None) -> PerfView:
        c, now = self._measurements.c, time.time()
        today = self._sa.tuple_(c.kernel, c.build).in_(sorted(builds.items()))
        result: Sequence[Sequence[Any]] = ()
        if builds and not self._missing:
            with self._store_errors(), self._engine.connect() as connection:
                result = connection.execute(self._select(c.at >= since, today)).all()
        rows, problem = [], ""
        for values in result:  # a bad row of another client costs only itself
            try:
                m = self._checked_row(values)
                rows.append(m if m.at <= now else m._replace(at=now))
            except StoreError as e:
                problem = str(e)
        if problem:
            on_damage(problem)
        return PerfView(rows, self.rates())

    def delete(self, rows: Iterable[Measurement]) -> None:
        if self.read_only:
            raise StoreError(f"{self.name} was opened to be read; nothing was removed")
        sa, c = self._sa, self._measurements.c
        columns = (*KEY, "at")
        deletion = self._measurements.delete().where(*(c[name] == sa.bindparam(f"_{name}")
                                                       for name in columns))
        keys = [{f"_{name}": getattr(m, name) for name in columns} for m in rows]
        unused = self._environments.delete().where(
            self._environments.c.id.not_in(sa.select(c.environment)))
        with self._store_errors(), self._engine.begin() as connection:
            for batch in _batches(keys):
                connection.execute(deletion, batch)
            connection.execute(unused)

    def close(self) -> None:
        self._engine.dispose()


def _driver() -> str:
    for name in DRIVERS:
        if importlib.util.find_spec(name) is not None:
            return name
    raise StoreError("perfdb is a PostgreSQL server, which needs a driver such as psycopg; "
                     "run: pip install 'layerzero[fleet]'")


def _batches(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for i in range(0, len(rows), BATCH):
        yield rows[i:i + BATCH]
