import java.io.File;
import java.time.LocalDate;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.execution.datasources.HadoopFsRelation;
import org.apache.spark.sql.execution.datasources.FileStatusCache;
import org.apache.spark.sql.execution.datasources.PartitionPath;
import org.apache.spark.sql.execution.datasources.PartitionSpec;
import org.apache.spark.sql.execution.datasources.PartitioningAwareFileIndex;
import org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat;
import org.apache.spark.sql.sources.BaseRelation;
import org.apache.spark.sql.types.StructType;

/**
 * The files of a table that is divided by date and hour, as a list. Spark neither lists directories nor looks at files
 * before it reads them; it leaves out the hours that a query does not need, as in other partitioned tables.
 *
 * Compiled by Janino (see spark/java/janino.py): only Java that Janino supports is used.
 */
public final class CommittedFileIndex extends PartitioningAwareFileIndex {
    private static final long BLOCK = 128L * 1024 * 1024;

    private final Path root;
    private final PartitionSpec hours;
    private final scala.collection.mutable.LinkedHashMap files = new scala.collection.mutable.LinkedHashMap();
    private scala.collection.immutable.Map byHour = scala.collection.immutable.Map$.MODULE$.empty();
    private long bytes = 0;

    /** `listing`: one line for each file: date, hour, name and size, separated by spaces. */
    private CommittedFileIndex(SparkSession session, String root, String listing) {
        super(session, scala.collection.immutable.Map$.MODULE$.empty(), scala.Option.empty(),
            FileStatusCache.getOrCreate(session));
        this.root = path(root);
        Map directories = new LinkedHashMap();
        String[] lines = listing.isEmpty() ? new String[0] : listing.split("\n");
        for (int i = 0; i < lines.length; i++) {
            String[] parts = lines[i].split(" ");
            String hour = parts[0] + " " + parts[1];
            if (!directories.containsKey(hour)) {
                directories.put(hour, new ArrayList());
            }
            Path file = path(root + "/date=" + parts[0] + "/hour=" + parts[1] + "/" + parts[2]);
            FileStatus status = new FileStatus(Long.parseLong(parts[3]), false, 1, BLOCK, 0L, file);
            ((List) directories.get(hour)).add(status);
            this.files.put(file, status);
            this.bytes += status.getLen();
        }
        scala.collection.mutable.ListBuffer paths = new scala.collection.mutable.ListBuffer();
        java.util.Iterator entries = directories.entrySet().iterator();
        while (entries.hasNext()) {
            Map.Entry entry = (Map.Entry) entries.next();
            String[] parts = ((String) entry.getKey()).split(" ");
            List several = (List) entry.getValue();
            Path directory = ((FileStatus) several.get(0)).getPath().getParent();
            Object[] values = new Object[] {
                Integer.valueOf((int) LocalDate.parse(parts[0]).toEpochDay()), Integer.valueOf(parts[1])
            };
            paths.addOne(new PartitionPath(new GenericInternalRow(values), directory));
            this.byHour = (scala.collection.immutable.Map) this.byHour.updated(
                directory, (FileStatus[]) several.toArray(new FileStatus[0]));
        }
        this.hours = new PartitionSpec(StructType.fromDDL("date date, hour int"), paths.toList());
    }

    /** The relation of the files; `columns`: those of the data files as DDL. */
    public static BaseRelation relation(SparkSession session, String root, String listing, String columns) {
        CommittedFileIndex index = new CommittedFileIndex(session, root, listing);
        return new HadoopFsRelation(index, index.hours.partitionColumns(), StructType.fromDDL(columns),
            scala.Option.empty(), new ParquetFileFormat(), scala.collection.immutable.Map$.MODULE$.empty(), session);
    }

    private static Path path(String local) {
        // The URI of a file escapes its special characters: a `%` in a name is not syntax.
        return new Path(new File(local).toURI());
    }

    public PartitionSpec partitionSpec() {
        return hours;
    }

    public scala.collection.mutable.LinkedHashMap leafFiles() {
        return files;
    }

    public scala.collection.immutable.Map leafDirToChildrenFiles() {
        return byHour;
    }

    public scala.collection.immutable.Seq rootPaths() {
        return new scala.collection.mutable.ListBuffer().addOne(root).toList();
    }

    public void refresh() {
        // The list is that of one moment. A later list is another index.
    }

    public long sizeInBytes() {
        return bytes;
    }
}
